// What kernels ask of the machine (machine.h): the headers here that stand for those of kernels/cuda call these
// functions. Each is called by one thread of the running kernel, and returns when that thread may go on.
//
// Addresses in shared memory are 32-bit, as on the GPU: of the own CTA, or with a CTA's rank for all of the cluster.
#pragma once

#include <cstdint>

namespace host {

struct Index {
  unsigned x, y, z;
};

// Of the running thread.
struct SpecialRegisters {
  Index thread, block, grid;
  unsigned cluster_rank;
};
extern SpecialRegisters registers;

// ---- Threads that meet ----

void sync_threads();                      // all threads of the CTA
void sync_named(int id, int threads);     // bar.sync
void arrive_named(int id, int threads);   // bar.arrive
bool any_named(int id, int threads, bool value);  // bar.red.or
void sync_warp();
void arrive_at_cluster();                 // once, orders no memory, except fenced initializations of mbarriers
void wait_for_cluster();
std::uint64_t exchange(std::uint64_t value, int lane, const char* instruction);  // what `lane` of the warp gave
bool any(bool value);
std::uint32_t ballot(bool value);
bool elect();
std::uint64_t nanoseconds();

// ---- Memory ----

char* shared_memory();                                        // dynamic, of the CTA
std::uint32_t shared_address(const void* p);
void* from_shared_address(std::uint32_t address);             // of the own CTA
std::uint32_t address_in(std::uint32_t address, std::uint32_t rank);
void copy_async(void* shared, const void* global, int bytes, bool exists);  // cp.async
void wait_for_copies();                                                      // for all of this thread
void arrive_after_copies(std::uint32_t barrier);                             // cp.async.mbarrier.arrive.noinc
void store_bulk(void* to, std::uint32_t from, std::uint32_t bytes);  // cp.async.bulk to global memory
void wait_for_bulk_reads();                                          // by all bulk stores of this thread
void fence_async_proxy();
void fence_gpu();                  // fence.acq_rel.gpu
void acquire_plan();               // by this thread
void wait_for_earlier_kernels();
std::uint32_t atomic_increment(int* counter, std::uint32_t last);  // publishes what this thread knows

// ---- mbarriers and TMA ----

void init_barrier(std::uint32_t barrier, std::uint32_t arrivals);
void fence_barrier_init();
void arrive(std::uint32_t barrier, std::uint32_t bytes = 0);
void wait(std::uint32_t barrier, std::uint32_t parity);
void load_box(std::uint32_t ctas, std::uint32_t to, const void* map, const int* coordinates, int rank,
              std::uint32_t barrier);  // ctas: a bit mask, 0 for the own one

// 16 bytes to shared memory of the cluster, which complete on a barrier of the same CTA.
void store_async(std::uint32_t to, const float* x, std::uint32_t barrier);

// ---- WGMMA ----

enum class Operands { kFloat16, kBFloat16, kE4M3 };

struct Product {
  float* d;                       // this thread's part of the accumulator [64, columns]
  int columns;
  const std::uint32_t* a;         // A [64, 16], of e4m3 [64, 32], in registers, or null
  std::uint64_t a_descriptor, b_descriptor;
  bool b_mn_major, accumulate;
  Operands type;
  bool a_mn_major = false;        // of A in shared memory
};
void wgmma(const Product& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
void check_registers(const float* d, int count);  // that no product in flight has them
void check_sum(float sum);                        // that a sum of probabilities is not negative

}  // namespace host
