// Clocks of a kernel: the cycles that each warp spends in each phase of its work.
//
// The macro CLOCKS is the offset of the clocks in dynamic shared memory, in bytes, after the memory of the kernel
// itself. If CLOCKS is not defined, these functions are empty. `python -m benchmarks clocks` compiles kernels with
// CLOCKS and reads the clocks.
#pragma once

#include "hopper.cuh"

namespace attn_ops {
namespace {

enum Phase {
  kPrologue,    // barriers, the wait for earlier kernels
  kSchedule,    // finding the next unit
  kWaitEmpty,   // waiting until a stage, or the query buffer, is empty
  kIssue,       // issuing loads; in converters, converting a tile
  kWaitUnit,    // waiting for the next unit and its queries
  kWaitKeys,
  kQk,          // S = Q K^T
  kSoftmax,     // mask, online softmax, storing P
  kWaitPeer,    // waiting for P of the other consumer
  kWaitValues,
  kPv,          // O += P V, and rescaling O
  kEpilogue,    // reducing and storing results
  kIdle,        // after the last unit
  kNumPhases
};

// Further columns of a warp: cycles from its start to its end, units and KV tiles that it computed, and nanoseconds of
// the global timer at its start and its end.
enum ClockColumn { kWhole = kNumPhases, kUnits, kTiles, kBeginNs, kEndNs, kClockColumns };

#if CLOCKS

struct WarpClock {
  uint64* row;         // this warp's row of clocks [CTAs, warps, kClockColumns]
  uint64 begin;        // nanoseconds at the start
  uint32 first, last;  // cycle counter at the start, and at the end of the latest phase
};

DEVICE WarpClock& warp_clock() {
  return reinterpret_cast<WarpClock*>(dynamic_shared() + CLOCKS)[threadIdx.x / 32];
}

DEVICE bool keeps_clock() { return threadIdx.x % 32 == 0; }

DEVICE void tally(ClockColumn column) {
  if (keeps_clock()) atomic_add(warp_clock().row + column, 1);
}

// Adds the cycles since the last call to `phase`. Not called before wait_for_earlier_kernels: an earlier kernel may
// clear the clocks.
DEVICE void mark(Phase phase) {
  if (!keeps_clock()) return;
  WarpClock& clock = warp_clock();
  const uint32 now = cycles();
  atomic_add(clock.row + phase, now - clock.last);
  clock.last = now;
}

DEVICE void start_clocks(uint64* clocks, int warps) {
  if (!keeps_clock()) return;
  uint64* row = clocks + (int64(blockIdx.x) * warps + threadIdx.x / 32) * kClockColumns;
  const uint64 begin = nanoseconds();
  const uint32 now = cycles();
  warp_clock() = {row, begin, now, now};
}

DEVICE void stop_clocks() {
  if (!keeps_clock()) return;
  const WarpClock& clock = warp_clock();
  atomic_add(clock.row + kWhole, cycles() - clock.first);
  atomic_add(clock.row + kBeginNs, clock.begin);
  atomic_add(clock.row + kEndNs, nanoseconds());
}

#else

DEVICE void tally(ClockColumn) {}
DEVICE void mark(Phase) {}
DEVICE void stop_clocks() {}

#endif

}  // namespace
}  // namespace attn_ops
