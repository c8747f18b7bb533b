// MLA: partial results of splits, in float16 with block scaling: kScaleColumns columns of a row share a scale, a power
// of two. The largest scaled magnitude of a block is in [2^14, 2^15), or below if the magnitudes are below 2^-112. So
// numbers of at least 2^-28 times the largest keep the 11 significant bits of float16. Partial results take half the
// memory traffic of float32.
#pragma once

#include "epilogue.cuh"
#include "mla_shared.cuh"

namespace attn_ops {
namespace {

constexpr int kScales = kLatent / kScaleColumns;  // scales of a row
using Stored = float[kStored / 2];                // a thread's part of two rows of kStored columns

// The scale of a block whose largest magnitude is `largest`, and the inverse of the scale.
struct Scale {
  float value, inverse;

  DEVICE explicit Scale(float largest) {
    constexpr uint32 kExponent = 1 << 23, kLeast = 15 * kExponent;
    const uint32 exponent = max(__float_as_uint(largest) & 255 * kExponent, kLeast);
    value = __uint_as_float(exponent - 14 * kExponent), inverse = __uint_as_float(268 * kExponent - exponent);
  }
};

// The partial results of all slots. The workspace may lie at any multiple of 4 bytes.
struct Partial {
  uint32* values;  // [rows, 512] float16, in pairs
  float* scales;   // [rows, kScales]
  float* lse;      // [rows]

  DEVICE Partial(float* workspace, int64 rows)
      : values(reinterpret_cast<uint32*>(workspace)),
        scales(workspace + rows * (kLatent / 2)),
        lse(workspace + rows * kLatent) {}
};

// Step 12 for a partial result: stores kStored columns, from `first_column` on, of the two rows of this thread, times
// `norm`. If the workspace is aligned to 16 bytes, the warp stages its 16 rows in its shared memory, `staged`, and
// issues one bulk store for each row that exists.
DEVICE void store_scaled(const Partial& to, uint32 staged, Stored& output, int first_column, const float (&norm)[2],
                         const int64 (&row)[2], const bool (&exists)[2]) {
  const uint32 lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int s = 0; s < kStored / kScaleColumns; ++s) {
      constexpr int kPairs = kScaleColumns / 8;  // pairs of columns of this thread and row that share a scale
      float largest = 0;
#pragma unroll
      for (int i = s * kPairs; i < (s + 1) * kPairs; ++i)
        largest = fmaxf(largest, fmaxf(fabsf(output[4 * i + 2 * r]), fabsf(output[4 * i + 2 * r + 1])));
      const Scale scale(max_of_quad(largest) * norm[r]);
      if (lane % 4 == s && exists[r]) to.scales[row[r] * kScales + first_column / kScaleColumns + s] = scale.value;
#pragma unroll
      for (int i = s * kPairs; i < (s + 1) * kPairs; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) output[4 * i + 2 * r + c] *= norm[r] * scale.inverse;
    }
  if (reinterpret_cast<uint64>(to.values) % 16 != 0)
    return store_rows<kFloat16>(to.values, output, first_column, FullRow<kLatent>{}, row, exists);
#pragma unroll
  for (int i = 0; i < kStored / 16; ++i) {
    uint32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = float16_pair(output[8 * i + 2 * j], output[8 * i + 2 * j + 1]);
    store_matrices(staged + lane % 16 * kStagedRowBytes + (2 * i + lane / 16) * 16, words);
  }
  fence_async_shared();
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (lane % 4 == 0 && exists[r])
      store_bulk(to.values + (row[r] * kLatent + first_column) / 2, staged + (lane / 4 + 8 * r) * kStagedRowBytes,
                 kStored * 2);
  wait_for_bulk_reads();
}

}  // namespace
}  // namespace attn_ops
