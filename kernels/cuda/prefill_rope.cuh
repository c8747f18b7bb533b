// Prefill: the converters with RoPE, which rotate queries and keys in place (ROPE_LLAMA).
//
// Columns i and i + kHalfDim are turned by position * rope_theta^(-2 i / kDimQk) / rope_scale radians, in float32, and
// rounded to their type. A thread has kOwnPairs such pairs of columns, of every kRowsAtOnce-th row.
#pragma once

#include "division.cuh"
#include "epilogue.cuh"
#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

constexpr int kHalfDim = kDimQk / 2, kOwnPairs = 4;
constexpr int kRowLanes = kHalfDim / kOwnPairs;  // threads of a row
constexpr int kRowsAtOnce = 32 * kConverterWarps / kRowLanes;
constexpr int kRowsOfStep = kRowsAtOnce < 8 ? 8 : kRowsAtOnce;  // whole groups
static_assert(kRowBytes == 128 && kTile % kRowsOfStep == 0 && kPackedRows % kRowsOfStep == 0);

DEVICE int converter_thread() { return threadIdx.x % (32 * kConverterWarps); }
DEVICE int own_row() { return converter_thread() / kRowLanes; }          // the first one
DEVICE int own_column() { return threadIdx.x % kRowLanes * kOwnPairs; }  // of the first half

// Of this thread's pairs, in 2^-64 turns for each position. Products with positions wrap at whole turns, so that angles
// are as accurate at the last position as at the first.
struct Frequencies {
  uint64 turns[kOwnPairs];

  DEVICE Frequencies(float theta, float scale) {
    const double exponent = log2(double(theta)) / kHalfDim, position = 1 / (6.283185307179586 * double(scale));
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i) {
      const double frequency = exp2(-exponent * (own_column() + i)) * position;
      turns[i] = static_cast<uint64>((frequency - floor(frequency)) * 0x1p64);
    }
  }
};

// Of this thread's pairs at a position.
struct Angles {
  float sin[kOwnPairs], cos[kOwnPairs];

  DEVICE Angles(const Frequencies& frequencies, int position) {
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i) {
      const int turns = static_cast<int>(frequencies.turns[i] * uint64(int64(position)) >> 32);  // at most half a turn
      const float radians = static_cast<float>(turns) * (3.14159265f * 0x1p-31f);
      sin[i] = sin_approx(radians), cos[i] = cos_approx(radians);
    }
  }

  DEVICE void add(const Angles& other) {
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i) {
      const float old_sin = sin[i], old_cos = cos[i];
      sin[i] = old_sin * other.cos[i] + old_cos * other.sin[i];
      cos[i] = old_cos * other.cos[i] - old_sin * other.sin[i];
    }
  }
};

DEVICE void unpack(uint32 pair, float& low, float& high) {
  if (DTYPE == 1)
    float16_values(pair, low, high);
  else
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
}

// This thread's pairs of a row. `at` is the address of their first columns; COLUMN bytes are from a block of columns to
// the next.
template <int COLUMN>
DEVICE void rotate(uint32 at, const Angles& angles) {
  const uint32 at_second = kHalfDim < kColumns ? at ^ kHalfDim * kElementBytes : at + kHalfDim / kColumns * COLUMN;
  const uint2 first = load_two_words(at), second = load_two_words(at_second);
  float x[kOwnPairs], y[kOwnPairs];
  unpack(first.x, x[0], x[1]), unpack(first.y, x[2], x[3]);
  unpack(second.x, y[0], y[1]), unpack(second.y, y[2], y[3]);
#pragma unroll
  for (int i = 0; i < kOwnPairs; ++i) {
    const float old = x[i];
    x[i] = old * angles.cos[i] - y[i] * angles.sin[i];
    y[i] = y[i] * angles.cos[i] + old * angles.sin[i];
  }
  store_shared(at, __uint_as_float(pack(x[0], x[1])), __uint_as_float(pack(x[2], x[3])));
  store_shared(at_second, __uint_as_float(pack(y[0], y[1])), __uint_as_float(pack(y[2], y[3])));
}

// ROWS rows of a swizzled tile, whose groups of 8 rows are GROUP bytes apart. `angles_of(i)` are those of the row that
// is `i` after this thread's first one, in ascending order.
template <int ROWS, int GROUP, int COLUMN, class AnglesOf>
DEVICE void rotate_rows(uint32 tile, AnglesOf angles_of) {
  const int row = own_row(), column = own_column();
  const uint32 block = tile + row / 8 * GROUP + column / kColumns * COLUMN;
#pragma unroll 1
  for (int first = 0; first < ROWS; first += kRowsOfStep)
#pragma unroll
    for (int i = 0; i < kRowsOfStep; i += kRowsAtOnce) {
      const uint32 in_group = swizzled((row + i) % 8 * kRowBytes + column % kColumns * kElementBytes);
      rotate<COLUMN>(block + first / 8 * GROUP + in_group, angles_of(first + i));
    }
}

DEVICE void rotate_queries(uint32 queries, const Problem& p, const QueryBlock& block, const Frequencies& frequencies) {
  const DivideByGroup row_of(p.group);
  const int position = block.position, first = block.remainder + own_row();
#pragma unroll 1
  for (int i = 0; i < p.block_rows(); i += kPackedRows)
    rotate_rows<kPackedRows, kGroupBytes, kPackedRows * kRowBytes>(
        queries + i / kPackedRows * kQueryBytes,
        [&](int row) { return Angles(frequencies, position + row_of(first + i + row)); });
}

// The angles of a tile begin with those of its first row; a row adds those of kRowsAtOnce positions.
DEVICE void rotate_keys(uint32 tile, int position, const Frequencies& frequencies, const Angles& step) {
  using Layout = TileLayout<kDimQk>;
  Angles angles(frequencies, position + own_row());
  rotate_rows<kTile, Layout::kGroup, Layout::kColumn>(tile, [&](int) {
    const Angles of_row = angles;
    angles.add(step);
    return of_row;
  });
}

// The warpgroup of converters: the queries of all units, and their keys.
DEVICE void rotate_queries_and_keys(const Problem& p, float theta, float scale, Shared& shared) {
  const Frequencies frequencies(theta, scale);
  const Angles step(frequencies, kRowsAtOnce);
  uint32 tile = 0;
  for (uint32 n = 0;; ++n) {
    const uint32 buffer = n % kQueries;
    wait(shared_address(&shared.q_loaded[buffer]), n / kQueries & 1);
    mark(kWaitUnit);
    const QueryBlock& block = shared.query_blocks[n % kQueryBlocks];
    const int stored = block.stored, start = block.start, end = block.end;
    if (stored >= 0 && start < end) rotate_queries(shared_address(shared.query[buffer][0]), p, block, frequencies);
    fence_async_shared();
    arrive_by_warp(shared_address(&shared.q_full[buffer]));
    mark(kIssue);
    if (stored < 0) return;
    for (int first = start; first < end; first += kTile, ++tile) {
      const uint32 stage = tile % kKeyStages;
      wait(shared_address(&shared.k_loaded[stage]), tile / kKeyStages & 1);
      mark(kWaitKeys);
      rotate_keys(shared_address(shared.keys[stage]), first, frequencies, step);
      fence_async_shared();
      arrive_by_warp(shared_address(&shared.k_full[tile % (2 * kKeyStages)]));
      mark(kIssue);
    }
  }
}

}  // namespace
}  // namespace attn_ops
