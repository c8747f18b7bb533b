// Tensors and shared memory: accesses of threads, cp.async.
#include "machine.h"

#include <cstring>

namespace host {

std::vector<Region> tensors;
Region static_shared;

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
  if (self->earlier_kernels_ended || region.is_shared) return;
  const bool of_plan = region.is_plan && !writes;
  if (!of_plan || !self->plan_acquired)
    fail(std::string(writes ? "write of " : "read of ") + region.name + " before griddepcontrol.wait" +
         (of_plan ? ", and before the plan is acquired, by " : ", by ") + describe(*self) + " " + at(pc));
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

void access(const void* p, std::size_t bytes, bool writes, const Access& by) {
  Region& region = region_of(p, bytes, writes, by.pc);
  check_ended(region, writes, by.pc);
  if (!region.shadow.exists()) {
    if (writes) fail(std::string("write of ") + region.name + ", which is not in `writes`, " + at(by.pc));
    return;
  }
  const std::size_t offset = static_cast<const char*>(p) - region.begin;
  if (writes)
    region.shadow.write(offset, bytes, by, self->view, cluster, region.is_shared, region.name);
  else
    region.shadow.read(offset, bytes, by, self->view, cluster, region.is_shared, region.name);
}

void access(const void* p, std::size_t bytes, bool writes, std::uint32_t pc) {
  access(p, bytes, writes, {pc, self->time(), self->entity(), false, self->acquired});
}

// ---- What kernels ask for ----

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
  self->copies.push_back({static_cast<char*>(shared), exists ? static_cast<const char*>(global) : nullptr, bytes});
}

void perform(const Copy& copy) {
  if (copy.from)
    std::memcpy(copy.to, copy.from, copy.bytes);
  else
    std::memset(copy.to, 0, copy.bytes);
}

void wait_for_copies() {
  const std::uint32_t pc = PC;
  for (const Copy& copy : self->copies) {
    access(copy.to, copy.bytes, true, pc);
    perform(copy);
  }
  self->copies.clear();
}

void fence_async_proxy() {
  std::copy_n(self->view.known, used_entities, self->view.fenced);
  ++self->time();
}

void fence_gpu() { self->acquired = true; }
void acquire_plan() { self->plan_acquired = true; }
void wait_for_earlier_kernels() { self->earlier_kernels_ended = true; }

std::uint32_t atomic_increment(int* counter, std::uint32_t last) {
  const std::uint32_t pc = PC, before = *counter;
  if (self) check_ended(region_of(counter, sizeof *counter, true, pc), true, pc);  // there is none in a program
  *counter = before >= last ? 0 : before + 1;
  if (self && self->acquired) {
    join(self->view, published[cluster]);  // of the same cluster
    published[cluster] = self->view;
    ++self->time();
  }
  return before;
}

}  // namespace host

// ---- What the compiler calls ----

namespace {

using namespace host;

// Each access of the kernel to memory that is not known to be its own registers.
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

}  // namespace

extern "C" {

// -fsanitize=thread: each access to memory.
#define ACCESSES(N)                                                           \
  void __tsan_read##N(void* p) { generic_access(p, N, false, PC); }           \
  void __tsan_write##N(void* p) { generic_access(p, N, true, PC); }           \
  void __tsan_unaligned_read##N(void* p) { generic_access(p, N, false, PC); } \
  void __tsan_unaligned_write##N(void* p) { generic_access(p, N, true, PC); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, std::size_t n) { generic_access(p, n, false, PC); }
void __tsan_write_range(void* p, std::size_t n) { generic_access(p, n, true, PC); }
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
