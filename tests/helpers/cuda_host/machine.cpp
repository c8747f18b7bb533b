// The machine that runs a kernel on the host. One thread runs until it must wait for others; then the scheduler takes
// the next. Copies and products are performed when the hardware may begin to, and are seen when it must have ended:
// reading their results before that is an error, or gives NaN.
#include "machine.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <list>
#include <memory>
#include <random>

#include "numbers.h"

namespace host {

SpecialRegisters registers;

namespace {

constexpr std::size_t kStackBytes = 256 << 10, kGuardBytes = 4096;
constexpr std::uint32_t kSharedBase = 1024;  // of the 32-bit addresses of a CTA's dynamic shared memory
constexpr int kRankShift = 24;               // addresses in a cluster have the CTA's rank + 1 from this bit on

std::string message;                 // of the failure
jmp_buf failed, scheduler;
Thread* self;                        // null while the scheduler runs
std::vector<Thread*> ready;
std::size_t ready_begin;             // of those in `ready` that have not run, in the order without a seed
std::list<Load> loads;
std::vector<Region> tensors;
Cta ctas[kMaxCtas];
int num_ctas;
const Launch* launch;
std::uint32_t cluster;               // number among all that have run
std::minstd_rand random_numbers;
char *image_begin, *image_end;       // of the kernel's code and constants
Region static_shared;
std::vector<std::unique_ptr<Accumulator>> accumulators;
char* stacks;

std::uint32_t pc_of(void* return_address) { return std::uint32_t(static_cast<char*>(return_address) - image_begin); }
#define PC pc_of(__builtin_return_address(0))

std::string at(std::uint32_t pc) {  // Python puts the line of the source in its place
  char text[32];
  std::snprintf(text, sizeof text, "@{%x}", pc ? pc - 1 : 0);
  return text;
}

std::string describe(const Thread& t) {
  return "thread " + std::to_string(t.index) + " (warp " + std::to_string(t.index / 32) + ") of CTA " +
         std::to_string(t.registers.block.x);
}

std::string describe(const Barrier& b) {
  return "mbarrier at byte " + std::to_string(b.offset) + " of shared memory, initialised " + at(b.pc);
}

// ---- Scheduler ----------------------------------------------------------------------------------------------------

void resume(Thread& t) {
  self = &t;
  registers = t.registers;
  if (_setjmp(scheduler) == 0) {
    if (t.started) _longjmp(t.context, 1);
    t.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = t.stack + kGuardBytes, context.uc_stack.ss_size = kStackBytes - kGuardBytes;
    makecontext(
        &context,
        [] {
          launch->kernel(launch->arguments);
          self->finished = true, --self->cta->running;
          _longjmp(scheduler, 1);
        },
        0);
    setcontext(&context);
  }
  self = nullptr;
}

void yield() {
  Thread& t = *self;
  if (_setjmp(t.context) == 0) _longjmp(scheduler, 1);
}

void block(Queue& queue, const char* instruction, std::uint32_t pc, const Barrier* barrier = nullptr,
           std::uint32_t parity = 0, int threads = 0) {
  Thread& t = *self;
  t.instruction = instruction, t.pc = pc, t.barrier = barrier, t.parity = parity, t.threads = threads;
  queue.threads.push_back(&t);
  yield();
}

void wake(Queue& queue) {
  ready.insert(ready.end(), queue.threads.begin(), queue.threads.end());
  queue.threads.clear();
}

void land(const Load& load);

// Runs one thread or lets one load land. False if nothing is left to do.
bool step() {
  const std::size_t count = ready.size() - ready_begin;
  if (!count && loads.empty()) return false;
  // Without a seed a load lands when no thread can go on.
  const std::size_t chosen = launch->seed ? random_numbers() % (count + loads.size()) : 0;
  if (chosen >= count) {
    const auto load = std::next(loads.begin(), chosen - count);
    land(*load);
    loads.erase(load);
    return true;
  }
  if (launch->seed) std::swap(ready[ready_begin], ready[ready_begin + chosen]);
  Thread* t = ready[ready_begin++];
  if (ready_begin >= 4096) ready.erase(ready.begin(), ready.begin() + ready_begin), ready_begin = 0;
  resume(*t);
  return true;
}

std::string deadlock() {
  std::string text = "deadlock: every thread waits";
  for (int c = 0; c < num_ctas; ++c)
    for (int first = 0; first < launch->threads; first += 32) {
      std::map<std::string, int> waits;
      for (int i = first; i < std::min(first + 32, launch->threads); ++i) {
        const Thread& t = ctas[c].threads[i];
        if (t.finished) continue;
        std::string what = std::string(t.instruction) + " " + at(t.pc);
        if (const Barrier* b = t.barrier)
          what += " for parity " + std::to_string(t.parity) + " of the " + describe(*b) + ": phase " +
                  std::to_string(b->phase) + " lacks " + std::to_string(b->missing) + " of " +
                  std::to_string(b->arrivals) + " arrivals and " + std::to_string(b->bytes) + " bytes";
        if (t.threads) what += " for " + std::to_string(t.threads) + " threads";
        ++waits[what];
      }
      for (const auto& [what, count] : waits)
        text += "\n  CTA " + std::to_string(ctas[c].threads[0].registers.block.x) + " warp " +
                std::to_string(first / 32) + ", " + std::to_string(count) + " threads: " + what;
    }
  return text;
}

// ---- Memory -------------------------------------------------------------------------------------------------------

// The CTA of an address, and the offset in its shared memory.
Cta& cta_of(std::uint32_t address, std::uint32_t* offset) {
  const int rank = int(address >> kRankShift) - 1;
  *offset = (address & ((1 << kRankShift) - 1)) - kSharedBase;
  if (rank >= num_ctas) fail("an address in CTA " + std::to_string(rank) + " of the cluster, by " + describe(*self));
  return rank < 0 ? *self->cta : ctas[rank];
}

void check_shared(const Cta& cta, std::uint32_t offset, std::size_t bytes, const char* what, std::uint32_t pc) {
  if (offset + bytes > cta.shared.bytes)
    fail(std::string(what) + " outside of shared memory: bytes " + std::to_string(int(offset)) + " to " +
         std::to_string(int(offset) + bytes) + " of " + std::to_string(cta.shared.bytes) + ", " + at(pc));
}

void check_ended(const Region& region, bool writes, std::uint32_t pc) {
  if (!self->earlier_kernels_ended && !region.is_shared && (writes || !region.is_plan))
    fail(std::string(writes ? "write of " : "read of ") + region.name +
         " before griddepcontrol.wait, by " + describe(*self) + " " + at(pc));
}

Region& region_of(const void* p, std::size_t bytes, bool writes, std::uint32_t pc) {
  if (self->cta->shared.has(p, bytes)) return self->cta->shared;
  if (static_shared.has(p, bytes)) return static_shared;
  for (Region& region : tensors)
    if (region.has(p, bytes)) return region;
  std::string text = (writes ? "write of " : "read of ") + std::to_string(bytes) + " bytes outside of all tensors, by " +
                     describe(*self) + " " + at(pc);
  const auto note = [&](const Region& region) {
    const auto offset = static_cast<const char*>(p) - region.begin;
    if (offset > -(1 << 20) && offset < std::ptrdiff_t(region.bytes) + (1 << 20))
      text += "\n  at byte " + std::to_string(offset) + " of " + region.name + ", which has " +
              std::to_string(region.bytes);
  };
  for (int c = 0; c < num_ctas; ++c) note(ctas[c].shared);
  for (const Region& region : tensors) note(region);
  fail(text);
}

void access(const void* p, std::size_t bytes, bool writes, std::uint32_t pc) {
  Region& region = region_of(p, bytes, writes, pc);
  check_ended(region, writes, pc);
  if (!region.shadow.exists()) {
    if (writes) fail(std::string("write of ") + region.name + ", which is not in `writes`, " + at(pc));
    return;
  }
  const Access by = {pc, self->time(), self->entity(), false};
  const std::size_t offset = static_cast<const char*>(p) - region.begin;
  if (writes)
    region.shadow.write(offset, bytes, by, self->view, cluster, region.is_shared, region.name);
  else
    region.shadow.read(offset, bytes, by, self->view, cluster, region.is_shared, region.name);
}

// Each access of the kernel to memory that is not known to be its own registers: the compiler calls this.
void generic_access(const void* p, std::size_t bytes, bool writes, std::uint32_t pc) {
  const char* address = static_cast<const char*>(p);
  if (address >= self->stack && address < self->stack + kStackBytes) {
    for (const InFlight& one : self->in_flight) {
      const char* begin = static_cast<const char*>(one.registers);
      if (address < begin + one.bytes && address + bytes > begin && (writes || one.accumulator))
        fail(std::string(one.accumulator ? "an accumulator is used" : "an operand in registers is written") +
             " before wgmma.wait_group, by " + describe(*self) + " " + at(pc));
    }
    return;
  }
  if (address >= reinterpret_cast<char*>(&registers) && address < reinterpret_cast<char*>(&registers + 1)) return;
  if (!writes && address >= image_begin && address < image_end && !static_shared.has(p, bytes)) return;
  access(p, bytes, writes, pc);
}

// ---- mbarriers ----------------------------------------------------------------------------------------------------

Barrier& barrier_of(std::uint32_t address, std::uint32_t pc) {
  std::uint32_t offset;
  Cta& cta = cta_of(address, &offset);
  const auto found = cta.barriers.find(offset);
  if (found == cta.barriers.end())
    fail("byte " + std::to_string(int(offset)) + " of shared memory is no mbarrier, " + at(pc));
  Barrier& b = found->second;
  if (self->view.known[b.initialiser] < b.initialised || (&cta != self->cta && !b.fenced))
    fail("the initialisation is not visible yet: " + describe(b) + "\n  used by " + describe(*self) + " " + at(pc));
  if (!cta.running) fail("a CTA of the cluster may end before this: " + describe(b) + "\n  used " + at(pc));
  return b;
}

void end_phase(Barrier& b) {
  if (b.missing || b.bytes) return;
  ++b.phase;
  b.missing = b.arrivals;
  b.done = b.arriving;
  b.done.known[b.entity] = b.phase;
  std::memset(&b.arriving, 0, sizeof b.arriving);
  wake(b.waiting);
}

// ---- TMA ----------------------------------------------------------------------------------------------------------

std::uint32_t swizzled(std::uint32_t address, int swizzle) {
  return address ^ ((address >> 7 & (swizzle / 16 - 1)) << 4);
}

int bytes_of_box(const Map& map) {
  std::int64_t bytes = map.strides[0];
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return int(bytes);
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

void land(const Load& load) {
  const Map& map = load.map;
  const int row_bytes = int(map.box[0] * map.strides[0]), chunk = std::min(row_bytes, 16);
  for (const auto& [cta, barrier] : load.to) {
    if (!cta->running) fail("a CTA of the cluster may end before a load to it, onto the " + describe(*barrier));
    for_each_row(load, [&](const char* from, int number) {
      for (int i = 0; i < row_bytes; i += chunk) {
        const std::uint32_t to = swizzled(kSharedBase + load.offset + number * row_bytes + i, map.swizzle) - kSharedBase;
        if (from)
          std::memcpy(cta->shared.begin + to, from + i, chunk);
        else
          std::memset(cta->shared.begin + to, 0, chunk);
      }
    });
    barrier->bytes -= bytes_of_box(map);
    end_phase(*barrier);
  }
}

// ---- WGMMA --------------------------------------------------------------------------------------------------------

// An operand in shared memory. Its rows are as wide as the swizzle. Hardware swizzles addresses: the layout repeats every 8
// rows, counted from address 0.
struct Operand {
  std::uint32_t start, leading, stride, width;  // bytes

  Operand(std::uint64_t d, std::uint32_t pc)
      : start(d << 4 & 0x3FFF0), leading(d >> 12 & 0x3FFF0), stride(d >> 28 & 0x3FFF0), width(256 >> (d >> 62)) {
    if ((width != 128 && width != 64) || (d >> 49 & 7))
      fail("a descriptor of another swizzle than 128 or 64 bytes, " + at(pc));
  }
  // Of 16 bytes of row `r` of the matrix in memory.
  std::uint32_t chunk(std::uint32_t r, std::uint32_t byte) const {
    return swizzled(start + r / 8 * stride + r % 8 * width + byte / width * leading + byte % width, width);
  }
};

struct Multiplication {
  WarpGroup& group;
  const Product& product;
  Cta& cta;
  View view;  // what all threads know
  Access access;
  std::uint32_t pc;

  int size() const { return product.type == Operands::kE4M3 ? 1 : 2; }  // bytes of an element

  // Element `i` of packed ones.
  float value(const void* packed, int i) const {
    if (size() == 1) return from_e4m3(static_cast<const std::uint8_t*>(packed)[i]);
    const std::uint16_t x = static_cast<const std::uint16_t*>(packed)[i];
    return product.type == Operands::kBFloat16 ? from_bfloat16(x) : from_float16(x);
  }

  // Elements of 16 bytes.
  void load(std::uint32_t address, float (&to)[16]) {
    const std::uint32_t offset = address - kSharedBase;
    check_shared(cta, offset, 16, "an operand of wgmma", pc);
    cta.shared.shadow.read(offset, 16, access, view, cluster, true, cta.shared.name);
    alignas(16) char from[16];
    std::memcpy(from, cta.shared.begin + offset, sizeof from);
    for (int i = 0; i < 16 / size(); ++i) to[i] = value(from, i);
  }

  // Adds as the tensor cores add FP8 products: all terms lose their bits below 2^-13 of the largest one's leading bit.
  void add_coarsely(float* d, const float (&a)[32], const float (&b)[32][256]) const {
    static float quantum[256];
    const int columns = product.columns;
    for (int n = 0; n < columns; ++n) quantum[n] = std::abs(d[n]);
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < columns; ++n) quantum[n] = std::max(quantum[n], std::abs(a[k] * b[k][n]));
    for (int n = 0; n < columns; ++n) {
      const auto exponent = std::bit_cast<std::uint32_t>(quantum[n]) & 0x7F800000;  // 2^e of the largest
      quantum[n] = std::max(std::bit_cast<float>(exponent) * 0x1p-13f, 0x1p-100f);
      d[n] = std::trunc(d[n] / quantum[n]) * quantum[n];
    }
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < columns; ++n) d[n] += std::trunc(a[k] * b[k][n] / quantum[n]) * quantum[n];
  }

  void run(Accumulator& to) {
    static float a[64][32], b[32][256];
    const int columns = product.columns, of_word = 4 / size(), of_chunk = 16 / size(), depth = 32 / size();
    float values[16];
    if (product.a) {
      for (int t = 0; t < 128; ++t)
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < of_word; ++j)
            a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][t % 4 * of_word + i / 2 * of_chunk + j] =
                value(&group.products[t].a[i], j);
    } else {
      const Operand operand(product.a_descriptor, pc);
      for (int row = 0; row < 64; ++row)
        for (int k = 0; k < depth; k += of_chunk)
          load(operand.chunk(row, k * size()), values), std::copy_n(values, of_chunk, &a[row][k]);
    }
    const Operand operand(product.b_descriptor, pc);
    if (product.b_mn_major) {
      for (int k = 0; k < depth; ++k)
        for (int n = 0; n < columns; n += of_chunk)
          load(operand.chunk(k, n * size()), values), std::copy_n(values, of_chunk, &b[k][n]);
    } else {
      for (int n = 0; n < columns; ++n)
        for (int k = 0; k < depth; k += of_chunk) {
          load(operand.chunk(n, k * size()), values);
          for (int i = 0; i < of_chunk; ++i) b[k + i][n] = values[i];
        }
    }
    for (int row = 0; row < 64; ++row) {
      float* d = to.d[row];
      if (!product.accumulate) std::fill_n(d, columns, 0.0f);
      if (size() == 1) {
        add_coarsely(d, a[row], b);
        continue;
      }
      for (int k = 0; k < depth; ++k)
        for (int n = 0; n < columns; ++n) d[n] += a[row][k] * b[k][n];
    }
  }
};

// The place of register `i` of a warpgroup's thread in an accumulator.
float& element(Accumulator& accumulator, int thread, int i) {
  return accumulator.d[thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + thread % 4 * 2 + i % 2];
}

InFlight* in_flight(Thread& t, const void* registers) {
  for (InFlight& one : t.in_flight)
    if (one.registers == registers) return &one;
  return nullptr;
}

// All threads of the warpgroup are here.
void multiply(WarpGroup& group, std::uint32_t pc) {
  const Product& first = group.products[0];
  Thread& leader = *group.threads[0];
  ++group.issued;
  Accumulator* accumulator = nullptr;
  if (const InFlight* one = in_flight(leader, first.d)) {
    accumulator = one->accumulator;
  } else {
    accumulators.push_back(std::make_unique<Accumulator>());
    accumulator = accumulators.back().get();
    accumulator->columns = first.columns;
  }
  const bool begins = accumulator->users == 0;
  for (int i = 0; i < 128; ++i) {
    const Product& p = group.products[i];
    Thread& t = *group.threads[i];
    if (p.columns != first.columns || p.a_descriptor != first.a_descriptor || p.b_descriptor != first.b_descriptor ||
        p.accumulate != first.accumulate || p.type != first.type || !p.a != !first.a || p.b_mn_major != first.b_mn_major)
      fail("wgmma with different operands in a warpgroup, " + at(pc));
    t.uncommitted = group.issued;
    if (p.a) {
      if (InFlight* one = in_flight(t, p.a))
        one->until = group.issued;
      else
        t.in_flight.push_back({p.a, 16, group.issued, nullptr});
    }
    if (!begins) {
      InFlight* one = in_flight(t, p.d);
      if (!one || one->accumulator != accumulator) fail("wgmma with different accumulators in a warpgroup, " + at(pc));
      one->until = group.issued;
      continue;
    }
    if (!t.may_give_registers) fail("wgmma without wgmma.fence after its registers were used, " + at(pc));
    for (int j = 0; j < p.columns / 2; ++j) {
      element(*accumulator, i, j) = p.d[j];
      p.d[j] = std::bit_cast<float>(0x7FFFFFFF);
    }
    t.in_flight.push_back({p.d, p.columns / 2 * sizeof(float), group.issued, accumulator});
    ++accumulator->users;
  }
  static View view;
  view = leader.view;
  for (int i = 1; i < 128; ++i) meet(view, group.threads[i]->view);
  const Access access = {pc, group.issued, tensor_core_entity(leader.cta->rank, leader.index / 32), true};
  Multiplication{group, first, *leader.cta, view, access, pc}.run(*accumulator);
}

void release_accumulator(Accumulator* accumulator) {
  if (--accumulator->users) return;
  std::erase_if(accumulators, [&](const auto& one) { return one.get() == accumulator; });
}

// ---- Launch -------------------------------------------------------------------------------------------------------

void set_image(const void* function) {
  Dl_info info;
  if (!dladdr(function, &info)) fail("the kernel is in no library");
  image_begin = static_cast<char*>(info.dli_fbase), image_end = image_begin;
  dl_iterate_phdr(
      [](dl_phdr_info* image, std::size_t, void*) {
        if (reinterpret_cast<char*>(image->dlpi_addr) == image_begin)
          for (int i = 0; i < image->dlpi_phnum; ++i)
            if (image->dlpi_phdr[i].p_type == PT_LOAD)
              image_end = std::max(image_end, image_begin + image->dlpi_phdr[i].p_vaddr + image->dlpi_phdr[i].p_memsz);
        return 0;
      },
      nullptr);
}

void run_cluster(int first) {
  ++cluster;
  loads.clear(), ready.clear(), accumulators.clear();
  ready_begin = 0;
  for (int c = 0; c < num_ctas; ++c) {
    Cta& cta = ctas[c];
    Region shared = std::move(cta.shared);
    std::vector<Thread> threads = std::move(cta.threads);
    cta.~Cta();
    new (&cta) Cta{};
    cta.rank = c, cta.shared = std::move(shared), cta.threads = std::move(threads);
    std::memset(cta.shared.begin, 0xFF, cta.shared.bytes);
    cta.threads.resize(launch->threads);
    cta.running = launch->threads;
    const unsigned block = first + c, x = launch->grid[0], y = launch->grid[1];
    for (int i = 0; i < launch->threads; ++i) {
      Thread& t = cta.threads[i];
      std::memset(&t.view, 0, sizeof t.view);
      t.cta = &cta, t.index = i;
      t.registers = {{unsigned(i), 0, 0}, {block % x, block / x % y, block / x / y},
                     {x, y, unsigned(launch->grid[2])}, unsigned(c)};
      t.stack = stacks + (std::size_t(c) * kMaxThreads + i) * kStackBytes;
      t.started = t.finished = t.earlier_kernels_ended = t.may_give_registers = false;
      t.copies.clear(), t.in_flight.clear(), t.product_groups.clear();
      t.copy_groups = 0, t.uncommitted = 0;
      t.instruction = "", t.barrier = nullptr, t.threads = 0;
      t.time() = 1;
      ready.push_back(&t);
    }
  }
  while (step()) {
  }
  for (int c = 0; c < num_ctas; ++c) {
    if (ctas[c].running) fail(deadlock());
    for (const auto& [offset, b] : ctas[c].barriers)
      for (const auto& [entity, arrival] : b.remote)
        if (std::none_of(ctas[c].threads.begin(), ctas[c].threads.end(), [&, known = entity](const Thread& t) {
              return t.view.known[known] >= arrival.first;
            }))
          fail("a CTA of the cluster may end before an arrival " + at(arrival.second) + " on its " + describe(b));
    for (const BulkStores& stores : ctas[c].bulk_stores)
      if (!stores.reading.empty())
        fail("the kernel ends while a bulk store reads shared memory, in " +
             describe(ctas[c].threads[stores.reading.begin()->second]));
    for (const Thread& t : ctas[c].threads) {
      if (!t.in_flight.empty()) fail("the kernel ends while a product is in flight, in " + describe(t));
      for (const Copy& copy : t.copies)
        if (copy.from) fail("the kernel ends while a cp.async is in flight, in " + describe(t));
    }
  }
}

}  // namespace

void fail(std::string text) {
  message = std::move(text);
  _longjmp(failed, 1);
}

std::string describe(const Access& access) {
  const int cta = access.entity / kEntitiesOfCta, number = access.entity % kEntitiesOfCta;
  std::string text;
  if (number < kMaxThreads)
    text = describe(ctas[cta].threads[number]);
  else if (number < kMaxThreads + kMaxWarps)
    text = "wgmma of warps " + std::to_string(number - kMaxThreads) + " to " +
           std::to_string(number - kMaxThreads + 3) + " of CTA " + std::to_string(ctas[cta].threads[0].registers.block.x);
  else if (number >= kMaxThreads + kMaxWarps + kMaxBarriers)
    text = "bulk stores of warp " + std::to_string(number - kMaxThreads - kMaxWarps - kMaxBarriers) + " of CTA " +
           std::to_string(ctas[cta].threads[0].registers.block.x);
  else
    for (const auto& [offset, b] : ctas[cta].barriers)
      if (b.entity == access.entity) text = "TMA onto the " + describe(b);
  return text + ", " + at(access.pc);
}

// ---- Threads that meet --------------------------------------------------------------------------------------------

namespace {

void meet_at(Rendezvous& r, int threads, const char* instruction, std::uint32_t pc) {
  join(r.view, self->view);
  if (++r.arrived < threads) return block(r.waiting, instruction, pc, nullptr, 0, threads);
  r.waiting.threads.push_back(self);
  for (Thread* t : r.waiting.threads) {
    join(t->view, r.view);
    ++t->time();
  }
  r.waiting.threads.pop_back();
  r.arrived = 0;
  std::memset(&r.view, 0, sizeof r.view);
  wake(r.waiting);
}

// What all lanes of the warp give.
const std::uint64_t* gather(std::uint64_t value, const char* instruction, std::uint32_t pc) {
  Exchange& e = self->cta->exchanges[self->index / 32];
  std::uint64_t* values = e.values[e.turn & 1];
  if (e.arrived && std::strcmp(e.instruction, instruction))
    fail("a warp diverges: lanes are at " + std::string(e.instruction) + ", and " + describe(*self) + " at " +
         instruction + " " + at(pc));
  e.instruction = instruction;
  values[self->index % 32] = value;
  if (++e.arrived < 32) {
    block(e.waiting, instruction, pc);
  } else {
    e.arrived = 0, ++e.turn;
    wake(e.waiting);
  }
  return values;
}

}  // namespace

void sync_threads() { meet_at(self->cta->all, launch->threads, "__syncthreads", PC); }
void sync_named(int id, int threads) { meet_at(self->cta->named[id], threads, "bar.sync", PC); }
void sync_warp() { meet_at(self->cta->warps[self->index / 32], 32, "__syncwarp", PC); }

void arrive_at_cluster() {
  Rendezvous& r = ctas[0].named[0];
  if (++r.arrived > num_ctas * launch->threads) fail("the barrier of the cluster is used twice, " + at(PC));
  if (r.arrived == num_ctas * launch->threads) wake(r.waiting);
}

void wait_for_cluster() {
  const int threads = num_ctas * launch->threads;
  Rendezvous& r = ctas[0].named[0];
  if (r.arrived < threads) block(r.waiting, "barrier.cluster.wait", PC, nullptr, 0, threads);
  for (int c = 0; c < num_ctas; ++c)
    for (auto& [offset, b] : ctas[c].barriers)
      if (b.fenced) self->view.known[b.initialiser] = std::max(self->view.known[b.initialiser], b.initialised);
}

std::uint64_t exchange(std::uint64_t value, int lane, const char* instruction) {
  return gather(value, instruction, PC)[lane];
}

bool any(bool value) {
  const std::uint64_t* values = gather(value, "__any_sync", PC);
  return std::any_of(values, values + 32, [](std::uint64_t x) { return x != 0; });
}

std::uint32_t ballot(bool value) {
  const std::uint64_t* values = gather(value, "__ballot_sync", PC);
  std::uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= std::uint32_t(values[i] != 0) << i;
  return mask;
}

std::uint64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// Any lane may be elected. One is for the whole kernel, which relies on that: its loads and their arrival are in order.
bool elect() {
  gather(0, "elect", PC);
  return self->index % 32 == int(launch->seed % 32);
}

// ---- Memory -------------------------------------------------------------------------------------------------------

char* shared_memory() { return self->cta->shared.begin; }

std::uint32_t shared_address(const void* p) {
  const std::uint32_t pc = PC;
  const auto offset = static_cast<const char*>(p) - self->cta->shared.begin;
  if (offset < 0 || offset > std::ptrdiff_t(self->cta->shared.bytes)) fail("not an address of shared memory, " + at(pc));
  return kSharedBase + std::uint32_t(offset);
}

void* from_shared_address(std::uint32_t address) {
  const std::uint32_t pc = PC, offset = address - kSharedBase;
  check_shared(*self->cta, offset, 1, "access", pc);
  return self->cta->shared.begin + offset;
}

std::uint32_t address_in(std::uint32_t address, std::uint32_t rank) { return address | (rank + 1) << kRankShift; }

void copy_async(void* shared, const void* global, int bytes, bool exists) {
  const std::uint32_t pc = PC;
  access(shared, bytes, true, pc);
  if (exists) access(global, bytes, false, pc);
  if (reinterpret_cast<std::uintptr_t>(shared) % bytes || (exists && reinterpret_cast<std::uintptr_t>(global) % bytes))
    fail("cp.async of an address that is no multiple of its size, " + at(pc));
  std::memset(shared, 0xFF, bytes);
  self->copies.push_back({static_cast<char*>(shared), exists ? static_cast<const char*>(global) : nullptr, bytes,
                          self->copy_groups});
}

void commit_copies() { ++self->copy_groups; }

void wait_for_copies(int pending) {
  const std::uint32_t pc = PC;
  const int until = pending < 0 ? self->copy_groups + 1 : self->copy_groups - pending;
  std::erase_if(self->copies, [&](const Copy& copy) {
    if (copy.group >= until) return false;
    access(copy.to, copy.bytes, true, pc);
    if (copy.from)
      std::memcpy(copy.to, copy.from, copy.bytes);
    else
      std::memset(copy.to, 0, copy.bytes);
    return true;
  });
}

void store_bulk(void* to, std::uint32_t from, std::uint32_t bytes) {
  const std::uint32_t pc = PC, offset = from - kSharedBase;
  Cta& cta = *self->cta;
  check_shared(cta, offset, bytes, "a bulk store", pc);
  if (from % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(to) % 16)
    fail("a bulk store that is not aligned to 16 bytes, " + at(pc));
  const int warp = self->index / 32;
  BulkStores& stores = cta.bulk_stores[warp];
  const Access by = {pc, ++stores.issued, bulk_entity(cta.rank, warp), true};
  cta.shared.shadow.read(offset, bytes, by, self->view, cluster, true, cta.shared.name);
  access(to, bytes, true, pc);
  std::memcpy(to, cta.shared.begin + offset, bytes);
  stores.reading[by.time] = self->index;
}

void wait_for_bulk_reads() {
  const int warp = self->index / 32;
  BulkStores& stores = self->cta->bulk_stores[warp];
  std::erase_if(stores.reading, [](const auto& one) { return one.second == self->index; });
  self->view.known[bulk_entity(self->cta->rank, warp)] =
      stores.reading.empty() ? stores.issued : stores.reading.begin()->first - 1;
}

void fence_async_proxy() {
  std::copy_n(self->view.known, used_entities, self->view.fenced);
  ++self->time();
}

void wait_for_earlier_kernels() { self->earlier_kernels_ended = true; }

// ---- mbarriers and TMA --------------------------------------------------------------------------------------------

void init_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  const std::uint32_t pc = PC;
  std::uint32_t offset;
  Cta& cta = cta_of(barrier, &offset);
  check_shared(cta, offset, 8, "an mbarrier", pc);
  if (cta.barriers.count(offset) || cta.barriers.size() == kMaxBarriers || arrivals == 0)
    fail("an mbarrier is initialised twice, has no arrivals, or there are too many, " + at(pc));
  Barrier& b = cta.barriers[offset];
  b.entity = barrier_entity(cta.rank, int(cta.barriers.size()) - 1);
  b.offset = offset, b.pc = pc, b.arrivals = b.missing = int(arrivals);
  b.initialiser = self->entity(), b.initialised = self->time();
}

void fence_barrier_init() {
  for (auto& [offset, b] : self->cta->barriers)
    if (b.initialiser == self->entity()) b.fenced = true;
  ++self->time();
}

void arrive(std::uint32_t barrier, std::uint32_t bytes) {
  const std::uint32_t pc = PC;
  Barrier& b = barrier_of(barrier, pc);
  if (b.missing == 0) fail("more arrivals than a phase has: " + describe(b) + "\n  " + describe(*self) + " " + at(pc));
  --b.missing, b.bytes += bytes;
  if (barrier >> kRankShift && &ctas[(barrier >> kRankShift) - 1] != self->cta)
    b.remote[self->entity()] = {self->time(), pc};
  join(b.arriving, self->view);
  ++self->time();
  end_phase(b);
}

void wait(std::uint32_t barrier, std::uint32_t parity) {
  const std::uint32_t pc = PC;
  Barrier& b = barrier_of(barrier, pc);
  while ((b.phase & 1) == (parity & 1)) block(b.waiting, "wait", pc, &b, parity);
  join(self->view, b.done);
}

void load_box(std::uint32_t mask, std::uint32_t to, const void* map, const int* coordinates, int rank,
              std::uint32_t barrier) {
  const std::uint32_t pc = PC;
  Load load;
  std::memcpy(&load.map, map, sizeof load.map);
  if (load.map.rank != rank) fail("a load of another rank than its map's, or through a map of no elements, " + at(pc));
  std::copy_n(coordinates, rank, load.coordinates);
  if (load.coordinates[0] < 0 || load.coordinates[0] + load.map.box[0] > load.map.shape[0])
    fail("a load beyond the innermost dimension, " + at(pc));
  for_each_row(load, [&](const char* from, int) {
    if (from) check_ended(region_of(from, load.map.box[0] * load.map.strides[0], false, pc), false, pc);
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

// ---- mma.sync -----------------------------------------------------------------------------------------------------

void multiply_by_warp(const Fragments& fragments, bool bfloat16) {
  WarpProduct& product = self->cta->products[self->index / 32];
  product.lanes[self->index % 32] = fragments;
  if (++product.arrived < 32) return block(product.waiting, "mma.sync", PC);
  product.arrived = 0;
  const auto value = [&](std::uint32_t word, int half) {
    const auto x = std::uint16_t(word >> 16 * half);
    return bfloat16 ? from_bfloat16(x) : from_float16(x);
  };
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[row + i % 2 * 8][column + i / 2 * 8 + half] = value(product.lanes[lane].a[i], half);
      for (int i = 0; i < 2; ++i) b[column + i * 8 + half][row] = value(product.lanes[lane].b[i], half);
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      float sum = product.lanes[lane].d[i];
      for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      product.lanes[lane].d[i] = sum;
    }
  wake(product.waiting);
}

// ---- WGMMA --------------------------------------------------------------------------------------------------------

void wgmma(const Product& product) {
  const std::uint32_t pc = PC;
  WarpGroup& group = self->cta->groups[self->index / 128];
  group.products[self->index % 128] = product, group.threads[self->index % 128] = self;
  if (++group.arrived < 128) return block(group.waiting, "wgmma", pc);
  group.arrived = 0;
  multiply(group, pc);
  wake(group.waiting);
}

void wgmma_fence() { self->may_give_registers = true; }

void wgmma_commit() { self->product_groups.push_back(self->uncommitted); }

void wgmma_wait(int pending) {
  Thread& t = *self;
  Time done = 0;
  while (int(t.product_groups.size()) > pending) done = t.product_groups.front(), t.product_groups.pop_front();
  t.may_give_registers = false;
  if (!done) return;
  Time& known = t.view.known[tensor_core_entity(t.cta->rank, t.index / 32)];
  known = std::max(known, done);
  std::erase_if(t.in_flight, [&](const InFlight& one) {
    if (one.until > done) return false;
    if (one.accumulator) {
      float* d = static_cast<float*>(const_cast<void*>(one.registers));
      for (std::size_t i = 0; i < one.bytes / sizeof(float); ++i) d[i] = element(*one.accumulator, t.index % 128, int(i));
      release_accumulator(one.accumulator);
    }
    return true;
  });
}

void check_registers(const float* d, int count) {
  const std::uint32_t pc = PC;
  for (const InFlight& one : self->in_flight)
    if (one.accumulator && one.registers >= d && one.registers < d + count)
      fail("an accumulator is fenced before wgmma.wait_group, by " + describe(*self) + " " + at(pc));
}

// ---- Launch -------------------------------------------------------------------------------------------------------

// Null, or why the kernel failed.
extern "C" const char* host_launch(const Launch* one, const void* static_begin, const void* static_end) {
  launch = one;
  if (_setjmp(failed)) return message.c_str();
  self = nullptr;
  set_image(reinterpret_cast<const void*>(one->kernel));
  num_ctas = one->cluster;
  used_entities = num_ctas * kEntitiesOfCta;
  random_numbers.seed(one->seed);
  if (!stacks) {
    const std::size_t bytes = kMaxCtas * kMaxThreads * kStackBytes;
    stacks = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (std::size_t i = 0; i < bytes; i += kStackBytes) mprotect(stacks + i, kGuardBytes, PROT_NONE);
  }
  const int ctas_of_grid = one->grid[0] * one->grid[1] * one->grid[2];
  if (num_ctas > kMaxCtas || ctas_of_grid % num_ctas || one->threads > kMaxThreads || one->threads % 32)
    fail("a grid or CTA that the machine does not have");
  static std::vector<std::vector<char>> memory;  // a failure does not return
  memory.assign(num_ctas, std::vector<char>(one->shared_bytes + 1024));
  const auto add_shared = [](Region& region, const char* name, char* begin, std::size_t bytes) {
    region.name = name, region.begin = begin, region.bytes = bytes, region.is_shared = true;
    region.shadow.reset(bytes, 4);
  };
  for (int c = 0; c < num_ctas; ++c) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory[c].data());
    add_shared(ctas[c].shared, "shared memory", reinterpret_cast<char*>((address + 1023) / 1024 * 1024),
               one->shared_bytes);
  }
  char* statics = const_cast<char*>(static_cast<const char*>(static_begin));
  add_shared(static_shared, "static shared memory", statics, static_cast<const char*>(static_end) - statics);
  tensors.clear();
  for (int i = 0; i < one->num_regions; ++i) {
    const RegionOfLaunch& r = one->regions[i];
    tensors.push_back({r.name, static_cast<char*>(r.begin), std::size_t(r.bytes), false, r.is_plan != 0, {}});
    if (r.granule) tensors.back().shadow.reset(r.bytes, r.granule);
  }
  cluster = 0;
  static std::vector<int> order;
  order.clear();
  for (int i = 0; i < ctas_of_grid; i += num_ctas) order.push_back(i);
  if (one->seed) std::shuffle(order.begin(), order.end(), random_numbers);
  for (int first : order) run_cluster(first);
  return nullptr;
}

}  // namespace host

// ---- What the compiler calls --------------------------------------------------------------------------------------

extern "C" {

// -fsanitize=thread: each access to memory.
#define ACCESSES(N)                                                                                                   \
  void __tsan_read##N(void* p) { host::generic_access(p, N, false, host::pc_of(__builtin_return_address(0))); }       \
  void __tsan_write##N(void* p) { host::generic_access(p, N, true, host::pc_of(__builtin_return_address(0))); }       \
  void __tsan_unaligned_read##N(void* p) { host::generic_access(p, N, false, host::pc_of(__builtin_return_address(0))); } \
  void __tsan_unaligned_write##N(void* p) { host::generic_access(p, N, true, host::pc_of(__builtin_return_address(0))); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, std::size_t n) {
  host::generic_access(p, n, false, host::pc_of(__builtin_return_address(0)));
}
void __tsan_write_range(void* p, std::size_t n) {
  host::generic_access(p, n, true, host::pc_of(__builtin_return_address(0)));
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// -fsanitize=undefined: each of these begins with the place in the source.
struct Place {
  const char* file;
  unsigned line, column;
};
#define UNDEFINED(NAME, TEXT) \
  void __ubsan_handle_##NAME(const Place* p) { host::fail(TEXT ", " + std::string(p->file) + ":" + std::to_string(p->line)); }
UNDEFINED(add_overflow, "a sum overflows")
UNDEFINED(sub_overflow, "a difference overflows")
UNDEFINED(mul_overflow, "a product overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "a division by zero, or one that overflows")
UNDEFINED(shift_out_of_bounds, "a shift by too much")
UNDEFINED(out_of_bounds, "an index out of bounds")
UNDEFINED(type_mismatch_v1, "an address that is null or not aligned")
UNDEFINED(builtin_unreachable, "a place that cannot be reached")
UNDEFINED(missing_return, "no return")
}
