// The machine that runs a kernel on the host: regions of memory, threads as fibers, CTAs, and what they wait for. One
// thread runs until it must wait for others; then the scheduler takes the next. Copies and products are performed when
// the hardware may begin to, and are seen when it must have ended: reading their results before that is an error, or
// gives NaN.
#pragma once

#include <csetjmp>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "interface.h"
#include "races.h"

namespace host {

constexpr std::size_t kStackBytes = 256 << 10, kGuardBytes = 4096;
constexpr std::uint32_t kSharedBase = 1024;  // of the 32-bit addresses of a CTA's dynamic shared memory
constexpr int kRankShift = 24;               // addresses in a cluster have the CTA's rank + 1 from this bit on

// A tensor, or shared memory. All accesses are within one.
struct Region {
  const char* name;
  char* begin;
  std::size_t bytes;
  bool is_shared, is_plan;  // who has acquired a plan may read it before earlier kernels have ended
  Shadow shadow;            // unless nothing writes it

  bool has(const void* p, std::size_t size) const { return p >= begin && static_cast<const char*>(p) + size <= begin + bytes; }
};

struct Thread;

struct Queue {
  std::vector<Thread*> threads;
};

// Threads that wait for each other, and then know what each of them did.
struct Rendezvous {
  int arrived = 0;
  bool any = false, any_of_last = false;  // of the values that threads give, now and in the last meeting
  View view{};
  Queue waiting;
};

// An instruction that a warp executes as one: each lane gives a value and sees those of the others. Two sets of values,
// since a lane may be at the next one while another has yet to read those of this one.
struct Exchange {
  std::uint64_t values[2][32];
  unsigned turn = 0;
  int arrived = 0;
  const char* instruction = nullptr;
  Queue waiting;
};

struct Barrier {
  Entity entity;
  std::uint32_t offset, pc;  // of its initialization
  int arrivals;              // of a phase
  int missing;               // of this phase
  std::int64_t bytes = 0;    // that are expected and have not come; may be negative meanwhile
  std::uint32_t phase = 0;
  Entity initialiser;
  Time initialised;
  bool fenced = false;
  std::map<Entity, std::pair<Time, std::uint32_t>> remote;  // the last arrival of each thread of another CTA, and its pc
  View arriving{}, done{};   // what is known to those who arrive in this phase, and to those of the last one
  Queue waiting;
};

// An accumulator of a warpgroup while products are in flight: its threads' registers are NaN.
struct Accumulator {
  int columns, users = 0;
  float d[64][256];
};

// Registers of a thread that products in flight use, up to the product `until`.
struct InFlight {
  const void* registers;
  std::size_t bytes;
  Time until;
  Accumulator* accumulator;  // null if they are operands
};

struct WarpGroup {
  int arrived = 0;
  Product products[128];
  Thread* threads[128];
  Queue waiting;
  Time issued = 0;  // products
};

struct Copy {  // cp.async
  char* to;
  const char* from;  // null for zeros
  int bytes;
};

// An arrival of a thread at a barrier, when what it has copied has ended. The scheduler lets that happen at some time.
struct CopiedArrival {
  Thread* thread;
  Barrier* barrier;
  std::vector<Copy> copies;
  std::uint32_t phase;  // of the barrier, in which it arrives
  View view;            // what the thread knew
};

// The bulk stores of a thread, which are numbered from 1 on.
struct BulkStores {
  Entity entity = kNobody;    // until the first one
  Time issued = 0, read = 0;  // the last one, and the last that has read shared memory
};

struct Cta;

struct Thread {
  Cta* cta;
  int index;
  SpecialRegisters registers;
  View view;
  jmp_buf context;
  char* stack;
  bool started, finished, plan_acquired, earlier_kernels_ended, may_give_registers;
  bool acquired;  // it has executed a fence for the whole GPU
  std::vector<Copy> copies;
  BulkStores bulk_stores;
  std::vector<InFlight> in_flight;
  Time uncommitted;                  // the last product
  std::deque<Time> product_groups;   // the last product of each that is committed and has not been waited for
  // What it waits for, for reports.
  const char* instruction;
  std::uint32_t pc;
  const Barrier* barrier;
  std::uint32_t parity;
  int threads;  // of a barrier that is not an mbarrier

  Entity entity() const;
  Time& time() { return view.known[entity()]; }
};

struct Cta {
  int rank;
  Region shared;
  std::map<std::uint32_t, Barrier> barriers;  // by offset in shared memory
  Rendezvous all, named[16], warps[kMaxWarps];
  Exchange exchanges[kMaxWarps];
  WarpGroup groups[kMaxWarps / 4];
  std::vector<Thread> threads;
  int running, bulk_threads;
};

inline Entity Thread::entity() const { return thread_entity(cta->rank, index); }

// What tests/helpers/cuda_host/__init__.py writes into the 128 bytes of a tensor map.
struct Map {
  const char* base;
  std::int64_t strides[5];  // bytes, innermost first; the first is the size of an element
  std::int32_t shape[5], box[5];
  std::int32_t rank, swizzle;  // bytes
};
static_assert(sizeof(Map) <= 128);

// A load that has been issued. The scheduler lets it land at some time.
struct Load {
  Map map;
  int coordinates[5];
  std::vector<std::pair<Cta*, Barrier*>> to;
  std::uint32_t offset;  // in shared memory
};

extern "C" {
struct RegionOfLaunch {
  const char* name;
  void* begin;
  std::int64_t bytes;
  std::int32_t granule;  // bytes of an element that is written; 0 if none is
  std::int32_t is_plan;
};

struct Launch {
  void (*kernel)(void**);
  void** arguments;
  std::int32_t grid[3], cluster, threads, shared_bytes;
  const RegionOfLaunch* regions;
  std::int32_t num_regions;
  std::uint32_t seed;  // of the order of threads and loads; 0 is first in, first out
};
}

// ---- What runs ----

extern const Launch* launch;
extern std::uint32_t cluster;                 // number among all that have run
extern Cta ctas[kMaxCtas];                    // of the cluster
extern int num_ctas;
extern Thread* self;                          // null while the scheduler runs
extern std::vector<Thread*> ready;
extern std::list<Load> loads;                 // in flight
extern std::list<CopiedArrival> arrivals;     // in flight, those of a thread in order
extern std::vector<std::unique_ptr<Accumulator>> accumulators;
extern std::vector<Region> tensors;
extern Region static_shared;
extern char *image_begin, *image_end;         // of the kernel's code and constants
extern std::minstd_rand random_numbers;

// ---- messages.cpp ----

extern jmp_buf failed;                        // where `fail` goes
extern std::string message;                   // of the failure

inline std::uint32_t pc_of(void* return_address) {
  return std::uint32_t(static_cast<char*>(return_address) - image_begin);
}
#define PC host::pc_of(__builtin_return_address(0))
std::string at(std::uint32_t pc);
std::string describe(const Thread& t);
std::string describe(const Barrier& b);

// ---- scheduler.cpp ----

// The running thread waits in `queue`, at an instruction.
void block(Queue& queue, const char* instruction, std::uint32_t pc, const Barrier* barrier = nullptr,
           std::uint32_t parity = 0, int threads = 0);
void wake(Queue& queue);
void run_ready_threads();                     // and those that they wake
std::string deadlock();                       // where each thread waits

// ---- memory.cpp ----

Cta& cta_of(std::uint32_t address, std::uint32_t* offset);  // of an address; the offset in its shared memory
void check_shared(const Cta& cta, std::uint32_t offset, std::size_t bytes, const char* what, std::uint32_t pc);
void check_ended(const Region& region, bool writes, std::uint32_t pc);
Region& region_of(const void* p, std::size_t bytes, bool writes, std::uint32_t pc);
void access(const void* p, std::size_t bytes, bool writes, const Access& by);
void access(const void* p, std::size_t bytes, bool writes, std::uint32_t pc);  // by the running thread
void perform(const Copy& copy);

// ---- barriers.cpp ----

Barrier& barrier_of(std::uint32_t address, std::uint32_t pc);
void end_phase(Barrier& b);                   // if it is complete
void land(const CopiedArrival& arrival);

// ---- tma.cpp ----

inline std::uint32_t swizzled(std::uint32_t address, int swizzle) {
  return address ^ ((address >> 7 & (swizzle / 16 - 1)) << 4);
}
void land(const Load& load);

}  // namespace host
