// A clock-based account of a kernel: the cycles that each warp spends in each phase of its work.
//
// The macro CLOCKS is the place of the clocks in dynamic shared memory, in bytes, after all else. Without it these
// functions are empty. `python -m benchmarks clocks` compiles and reads them.
#pragma once

#include "hopper.cuh"

namespace attn_ops {
namespace {

enum Phase {
  kPrologue,    // barriers, the wait for earlier kernels
  kSchedule,    // finding the next unit
  kWaitEmpty,   // a stage, or the query buffer, is in use
  kIssue,       // issuing loads
  kWaitUnit,    // the next unit and its queries are not there
  kWaitKeys,
  kQk,          // S = Q K^T
  kSoftmax,     // mask, online softmax, handing P over
  kWaitPeer,    // P of the other consumer is not there
  kWaitValues,
  kPv,          // O += P V, and rescaling O
  kEpilogue,    // reducing and storing results
  kIdle,        // after the last unit
  kNumPhases
};

// Further columns of a warp: cycles from its start to its end, what it computed, and when it started and ended.
enum ClockColumn { kWhole = kNumPhases, kUnits, kTiles, kBeginNs, kEndNs, kClockColumns };

#if CLOCKS

struct WarpClock {
  uint64* row;         // of this warp in clocks [CTAs, warps, kClockColumns]
  uint64 begin;        // nanoseconds
  uint32 first, last;  // cycles at the start, and at the end of the latest phase
};

DEVICE WarpClock& warp_clock() {
  return reinterpret_cast<WarpClock*>(dynamic_shared() + CLOCKS)[threadIdx.x / 32];
}

DEVICE bool keeps_clock() { return threadIdx.x % 32 == 0; }

DEVICE void tally(ClockColumn column) {
  if (keeps_clock()) atomic_add(warp_clock().row + column, 1);
}

// What this warp did since the last call was `phase`. Not before the wait for earlier kernels, which may clear clocks.
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
