// RoPE of rows in shared memory (ROPE_LLAMA): columns i and i + dim / 2 of a head are a pair, which is rotated by
// position * rope_theta^(-2 i / dim) / rope_scale radians, in float32, and rounded to DTYPE.
#pragma once

#include "epilogue.cuh"
#include "hopper.cuh"

namespace attn_ops {
namespace {

// `turns(pair)` is the rotation of a pair of columns from one position to the next: the fraction of a whole turn, in
// units of 2^-64. Its products with positions wrap at whole turns, so that angles are as accurate at the last position
// as at the first.
template <int DIM>
struct Frequencies {
  double exponent, first;

  DEVICE Frequencies(float theta, float scale)
      : exponent(log2(double(theta)) / (DIM / 2)), first(1 / (6.283185307179586 * double(scale))) {}

  DEVICE uint64 turns(int pair) const {
    const double x = exp2(-exponent * pair) * first;
    return static_cast<uint64>((x - floor(x)) * 0x1p64);
  }
};

// Sines and cosines of the angles of PAIRS pairs of columns at one position.
template <int PAIRS>
struct Angles {
  float sin[PAIRS], cos[PAIRS];

  DEVICE Angles(const uint64 (&turns)[PAIRS], int position) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int angle = static_cast<int>(turns[i] * uint64(int64(position)) >> 32);  // 2^-32 turns, at most 1/2 turn
      const float radians = static_cast<float>(angle) * (3.14159265f * 0x1p-31f);
      sin[i] = sin_approx(radians), cos[i] = cos_approx(radians);
    }
  }

  // Adds the angles of `other`.
  DEVICE void add(const Angles& other) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float old_sin = sin[i], old_cos = cos[i];
      sin[i] = old_sin * other.cos[i] + old_cos * other.sin[i];
      cos[i] = old_cos * other.cos[i] - old_sin * other.sin[i];
    }
  }

  // Rotates the pairs (x[i], y[i]).
  DEVICE void turn(float (&x)[PAIRS], float (&y)[PAIRS]) const {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float old = x[i];
      x[i] = old * cos[i] - y[i] * sin[i];
      y[i] = y[i] * cos[i] + old * sin[i];
    }
  }
};

// Two elements of DTYPE as floats.
DEVICE void unpack(uint32 pair, float& low, float& high) {
  if (DTYPE == 1)
    float16_values(pair, low, high);
  else
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
}

// One of THREADS threads that rotate rows of DIM columns of 16 bits in place, swizzled as in hopper.cuh. It has kPairs
// pairs of columns of row `row`, and of every kRowsAtOnce-th row after `row`.
template <int DIM, int THREADS>
struct RowRotation {
  static constexpr int kPairs = 4, kLanes = DIM / 2 / kPairs;  // kLanes threads have a row
  static constexpr int kRowsAtOnce = THREADS / kLanes;
  static constexpr int kRowsOfStep = kRowsAtOnce < 8 ? 8 : kRowsAtOnce;  // a step has whole groups of 8 rows
  static constexpr int kColumns = 64;                                    // columns of a swizzled row of 128 bytes
  using OwnAngles = Angles<kPairs>;
  using OwnTurns = uint64[kPairs];

  int row, column;  // first row of this thread, and first column of its pairs, in the first half of the columns

  DEVICE explicit RowRotation(int thread) : row(thread / kLanes), column(thread % kLanes * kPairs) {}

  // Rotates the pairs of this thread in a row. `at` is the address of column `column`. Blocks of columns are COLUMN
  // bytes apart.
  template <int COLUMN>
  DEVICE static void rotate(uint32 at, const OwnAngles& angles) {
    const uint32 at_second = DIM / 2 < kColumns ? at ^ DIM / 2 * 2 : at + DIM / 2 / kColumns * COLUMN;
    const uint2 first = load_two_words(at), second = load_two_words(at_second);
    float x[kPairs], y[kPairs];
    unpack(first.x, x[0], x[1]), unpack(first.y, x[2], x[3]);
    unpack(second.x, y[0], y[1]), unpack(second.y, y[2], y[3]);
    angles.turn(x, y);
    store_shared(at, __uint_as_float(pack(x[0], x[1])), __uint_as_float(pack(x[2], x[3])));
    store_shared(at_second, __uint_as_float(pack(y[0], y[1])), __uint_as_float(pack(y[2], y[3])));
  }

  // Rotates the first `rows` rows of a tile, rounded up to whole steps. Groups of 8 rows are GROUP bytes apart.
  // `angles_of(i)` returns the angles of row `row` + i. It is called with ascending i.
  template <int GROUP, int COLUMN, class AnglesOf>
  DEVICE void rotate_rows(uint32 tile, int rows, AnglesOf angles_of) const {
    const uint32 block = tile + row / 8 * GROUP + column / kColumns * COLUMN;
#pragma unroll 1
    for (int first = 0; first < rows; first += kRowsOfStep)
#pragma unroll
      for (int i = 0; i < kRowsOfStep; i += kRowsAtOnce) {
        const int in_group = (row + i) % 8, chunk = column % kColumns / 8;
        rotate<COLUMN>(block + first / 8 * GROUP + in_group * 128 + (chunk ^ in_group) * 16 + column % 8 * 2,
                       angles_of(first + i));
      }
  }

  // Rotates ROWS keys of consecutive positions, of which the first is `position`. `step` are the angles of kRowsAtOnce
  // positions, which each next row of this thread adds.
  template <int ROWS, int GROUP, int COLUMN>
  DEVICE void rotate_keys(uint32 tile, int position, const OwnTurns& turns, const OwnAngles& step) const {
    static_assert(ROWS % kRowsOfStep == 0);
    OwnAngles angles(turns, position + row);
    rotate_rows<GROUP, COLUMN>(tile, ROWS, [&](int) {
      const OwnAngles of_row = angles;
      angles.add(step);
      return of_row;
    });
  }
};

}  // namespace
}  // namespace attn_ops
