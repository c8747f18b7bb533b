// The state of the machine: regions of memory, threads as fibers, CTAs, and what they wait for.
#pragma once

#include <csetjmp>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "interface.h"
#include "races.h"

namespace host {

// A tensor, or shared memory. All accesses are within one.
struct Region {
  const char* name;
  char* begin;
  std::size_t bytes;
  bool is_shared, is_plan;  // a plan may be read before earlier kernels have ended
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
  std::uint32_t offset, pc;  // of its initialisation
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

// Fragments of the lanes of a warp that have come to a product.
struct WarpProduct {
  int arrived = 0;
  Fragments lanes[32];
  Queue waiting;
};

struct Copy {  // cp.async
  char* to;
  const char* from;  // null for zeros
  int bytes, group;
};

// The bulk stores of a warp, which are numbered from 1 on.
struct BulkStores {
  Time issued = 0;
  std::map<Time, int> reading;  // those that may still read shared memory -> the thread
};

struct Cta;

struct Thread {
  Cta* cta;
  int index;
  SpecialRegisters registers;
  View view;
  jmp_buf context;
  char* stack;
  bool started, finished, earlier_kernels_ended, may_give_registers;
  std::vector<Copy> copies;
  int copy_groups;
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
  WarpProduct products[kMaxWarps];
  WarpGroup groups[kMaxWarps / 4];
  BulkStores bulk_stores[kMaxWarps];
  std::vector<Thread> threads;
  int running;
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

}  // namespace host
