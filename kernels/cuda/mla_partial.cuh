// MLA: partial results. They are float16 with a scale for each row and kScaleColumns columns: a power of two that brings
// the largest of these numbers to [2^14, 2^15). So a number of at least 2^-28 of the largest keeps the 11 bits of float16,
// and half as many bytes are written and read again as in float32.
#pragma once

#include "epilogue.cuh"
#include "mla_shared.cuh"

namespace attn_ops {
namespace {

using Stored = float[kStored / 2];  // of a thread

// The scale of numbers of which `largest` is the largest magnitude, and its inverse. Infinity is finite over its scale.
struct Scale {
  float value, inverse;

  DEVICE explicit Scale(float largest) {
    constexpr uint32 kExponent = 1 << 23, kLeast = 15 * kExponent;
    const uint32 exponent = max(__float_as_uint(largest) & 255 * kExponent, kLeast);
    value = __uint_as_float(exponent - 14 * kExponent), inverse = __uint_as_float(268 * kExponent - exponent);
  }
};

// The partial results of all slots, in a workspace at any multiple of 4 bytes.
struct Partial {
  uint32* values;  // [rows, 512] float16, in pairs
  float* scales;   // [rows, 512 / kScaleColumns]
  float* lse;      // [rows]

  DEVICE Partial(float* workspace, int64 rows)
      : values(reinterpret_cast<uint32*>(workspace)),
        scales(workspace + rows * (kLatent / 2)),
        lse(workspace + rows * kLatent) {}
};

// Stores columns of two rows from `first_column` on, multiplied by `norm`: through the memory `staged` of the warp by one
// bulk store for each row that exists, if the workspace is aligned to 16 bytes.
DEVICE void store_partial(const Partial& to, uint32 staged, Stored& output, int first_column, const float (&norm)[2],
                          const int64 (&row)[2], const bool (&exists)[2]) {
  const uint32 lane = threadIdx.x % 32;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kStored / 8; ++i)
      largest = fmaxf(largest, fmaxf(fabsf(output[4 * i + 2 * r]), fabsf(output[4 * i + 2 * r + 1])));
    const Scale scale(max_of_quad(largest) * norm[r]);
    factor[r] = norm[r] * scale.inverse;
    constexpr int kScales = kStored / kScaleColumns;
    if (lane % 4 < kScales && exists[r])
      to.scales[row[r] * (kLatent / kScaleColumns) + first_column / kScaleColumns + lane % 4] = scale.value;
  }
  rescale(output, factor);
  if (reinterpret_cast<uint64>(to.values) % 16 != 0)
    return store_rows<kFloat16, kLatent>(to.values, output, first_column, row, exists);
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
  __syncwarp();
}

}  // namespace
}  // namespace attn_ops
