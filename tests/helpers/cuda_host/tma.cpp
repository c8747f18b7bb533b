// Copies by the async proxy: TMA loads, and bulk stores.
#include "machine.h"

#include <algorithm>
#include <cstring>

namespace host {

namespace {

int bytes_of_box(const Map& map) {
  std::int64_t bytes = map.strides[0];
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return int(bytes);
}

// Bytes of a row of the box, along its innermost dimension, that are inside of the tensor.
int bytes_inside(const Load& load) {
  const Map& map = load.map;
  return int(std::clamp(map.shape[0] - load.coordinates[0], 0, map.box[0]) * map.strides[0]);
}

// Calls `row(from, number)` for each row of the box along its innermost dimension; `from` is null outside of the tensor.
template <class Row>
void for_each_row(const Load& load, Row row) {
  const Map& map = load.map;
  int index[5] = {}, number = 0;
  for (;;) {
    const char* from = map.base + load.coordinates[0] * map.strides[0];
    bool inside = true;
    for (int d = 1; d < map.rank; ++d) {
      const int at = load.coordinates[d] + index[d];
      inside &= at >= 0 && at < map.shape[d];
      from += at * map.strides[d];
    }
    row(inside ? from : nullptr, number++);
    int d = 1;
    while (d < map.rank && ++index[d] == map.box[d]) index[d++] = 0;
    if (d == map.rank) return;
  }
}

}  // namespace

void land(const Load& load) {
  const Map& map = load.map;
  const int row_bytes = int(map.box[0] * map.strides[0]), chunk = std::min(row_bytes, 16), inside = bytes_inside(load);
  for (const auto& [cta, barrier] : load.to) {
    if (!cta->running) fail("a CTA of the cluster may end before a load to it, onto the " + describe(*barrier));
    for_each_row(load, [&](const char* from, int number) {
      for (int i = 0; i < row_bytes; i += chunk) {
        const std::uint32_t to = swizzled(kSharedBase + load.offset + number * row_bytes + i, map.swizzle) - kSharedBase;
        const int read = from ? std::clamp(inside - i, 0, chunk) : 0;
        std::memcpy(cta->shared.begin + to, from + i, read);
        std::memset(cta->shared.begin + to + read, 0, chunk - read);
      }
    });
    barrier->bytes -= bytes_of_box(map);
    end_phase(*barrier);
  }
}

void load_box(std::uint32_t mask, std::uint32_t to, const void* map, const int* coordinates, int rank,
              std::uint32_t barrier) {
  const std::uint32_t pc = PC;
  Load load;
  std::memcpy(&load.map, map, sizeof load.map);
  if (load.map.rank != rank) fail("a load of another rank than its map's, or through a map of no elements, " + at(pc));
  std::copy_n(coordinates, rank, load.coordinates);
  if (load.coordinates[0] < 0) fail("a load before the innermost dimension, " + at(pc));
  const int inside = bytes_inside(load);
  for_each_row(load, [&](const char* from, int) {
    if (from && inside) check_ended(region_of(from, inside, false, pc), false, pc);
  });
  cta_of(to, &load.offset);
  const int bytes = bytes_of_box(load.map);
  if (to % 128 || (load.map.swizzle == 128 && to % 1024)) fail("a load to an unaligned address, " + at(pc));
  for (int c = 0; c < num_ctas; ++c) {
    if (mask ? !(mask >> c & 1) : &ctas[c] != self->cta) continue;
    check_shared(ctas[c], load.offset, bytes, "a load", pc);
    Barrier& b = barrier_of(mask ? address_in(barrier, c) : barrier, pc);
    load.to.emplace_back(&ctas[c], &b);
    // From now on the memory changes, until the phase ends.
    ctas[c].shared.shadow.write(load.offset, bytes, {pc, b.phase + 1, b.entity, true}, self->view, cluster, true,
                                ctas[c].shared.name);
  }
  loads.push_back(std::move(load));
}

// A write of the phase of its barrier, by the generic proxy. It is there at once; nobody may know that before the phase ends.
void store_async(std::uint32_t to, const float* x, std::uint32_t address) {
  const std::uint32_t pc = PC;
  std::uint32_t offset, of_barrier;
  Cta& cta = cta_of(to, &offset);
  Barrier& b = barrier_of(address, pc);
  if (&cta_of(address, &of_barrier) != &cta) fail("a store to another CTA than its mbarrier's, " + at(pc));
  if (to % 16) fail("a store of 16 bytes to an unaligned address, " + at(pc));
  check_shared(cta, offset, 16, "a store", pc);
  cta.shared.shadow.write(offset, 16, {pc, b.phase + 1, b.entity, false}, self->view, cluster, true, cta.shared.name);
  std::memcpy(cta.shared.begin + offset, x, 16);
  b.bytes -= 16;
  end_phase(b);
}

void store_bulk(void* to, std::uint32_t from, std::uint32_t bytes) {
  const std::uint32_t pc = PC, offset = from - kSharedBase;
  Cta& cta = *self->cta;
  check_shared(cta, offset, bytes, "a bulk store", pc);
  if (from % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(to) % 16)
    fail("a bulk store that is not aligned to 16 bytes, " + at(pc));
  BulkStores& stores = self->bulk_stores;
  if (stores.entity == kNobody) {
    if (cta.bulk_threads == kMaxBulkThreads) fail("too many threads have bulk stores, " + at(pc));
    stores.entity = bulk_entity(cta.rank, cta.bulk_threads++);
  }
  access(cta.shared.begin + offset, bytes, false, {pc, ++stores.issued, stores.entity, true});
  access(to, bytes, true, {pc, kNever, stores.entity, true});  // nothing here waits for writes
  std::memcpy(to, cta.shared.begin + offset, bytes);
}

void wait_for_bulk_reads() {
  BulkStores& stores = self->bulk_stores;
  stores.read = stores.issued;
  if (stores.issued) self->view.known[stores.entity] = stores.issued;
}

}  // namespace host
