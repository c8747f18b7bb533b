// Runs the clusters of a launch, one after the other, and looks at what each leaves.
#include "machine.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <cstring>

namespace host {

const Launch* launch;
std::uint32_t cluster;
Cta ctas[kMaxCtas];
int num_ctas;
char *image_begin, *image_end;

namespace {

char* stacks;

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
  loads.clear(), arrivals.clear(), ready.clear(), accumulators.clear();
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
      t.started = t.finished = t.plan_acquired = t.earlier_kernels_ended = t.may_give_registers = t.acquired = false;
      t.copies.clear(), t.in_flight.clear(), t.product_groups.clear();
      t.uncommitted = 0, t.bulk_stores = {};
      t.instruction = "", t.barrier = nullptr, t.threads = 0;
      t.time() = 1;
      ready.push_back(&t);
    }
  }
  run_ready_threads();
  for (int c = 0; c < num_ctas; ++c) {
    if (ctas[c].running) fail(deadlock());
    for (const auto& [offset, b] : ctas[c].barriers)
      for (const auto& [entity, arrival] : b.remote)
        if (std::none_of(ctas[c].threads.begin(), ctas[c].threads.end(), [&, known = entity](const Thread& t) {
              return t.view.known[known] >= arrival.first;
            }))
          fail("a CTA of the cluster may end before an arrival " + at(arrival.second) + " on its " + describe(b));
    for (const Thread& t : ctas[c].threads) {
      if (t.bulk_stores.read < t.bulk_stores.issued)
        fail("the kernel ends while a bulk store reads shared memory, in " + describe(t));
      if (!t.in_flight.empty()) fail("the kernel ends while a product is in flight, in " + describe(t));
      for (const Copy& copy : t.copies)
        if (copy.from) fail("the kernel ends while a cp.async is in flight, in " + describe(t));
    }
  }
}

}  // namespace

// Null, or why the kernel failed. `kept_stacks` is of the process: the machines of all kernels have the same stacks, as
// a process has at most 65,530 mappings, and each guard page makes two.
extern "C" __attribute__((visibility("default"))) const char* host_launch(const Launch* one, const void* static_begin,
                                                                          const void* static_end, char** kept_stacks) {
  launch = one;
  if (_setjmp(failed)) return message.c_str();
  self = nullptr;
  set_image(reinterpret_cast<const void*>(one->kernel));
  num_ctas = one->cluster;
  used_entities = num_ctas * kEntitiesOfCta;
  random_numbers.seed(one->seed);
  if (!*kept_stacks) {
    const std::size_t bytes = kMaxCtas * kMaxThreads * kStackBytes;
    *kept_stacks = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (std::size_t i = 0; i < bytes; i += kStackBytes) mprotect(*kept_stacks + i, kGuardBytes, PROT_NONE);
  }
  stacks = *kept_stacks;
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
  cluster = 0, published.clear();
  static std::vector<int> order;
  order.clear();
  for (int i = 0; i < ctas_of_grid; i += num_ctas) order.push_back(i);
  if (one->seed) std::shuffle(order.begin(), order.end(), random_numbers);
  for (int first : order) run_cluster(first);
  return nullptr;
}

}  // namespace host
