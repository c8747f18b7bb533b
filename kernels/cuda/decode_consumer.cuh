// Decode: the consumers.
//
// With r = lane / 4 and c = 2 * (lane % 4), a lane has of 16 tokens and 8 heads the logits of tokens r and r + 8 and heads
// c and c + 1, and of 16 columns and 8 heads the accumulator of these heads and two columns: `column_of`.
#pragma once

#include "decode_epilogue.cuh"
#include "decode_problem.cuh"
#include "epilogue.cuh"
#include "fp8.cuh"
#include "mma.cuh"
#include "tanh.cuh"

namespace attn_ops {
namespace {

constexpr int kHeadBlocks = kHeads / 8, kTokenBlocks = kWarpTokens / 16, kColumnBlocks = kDim / 16;
#if KV_FP8
constexpr Fp8Type kKvType = KV_FP8 == 2 ? kFp8E5M2 : kFp8E4M3;
#endif

using Query = uint32[kColumnBlocks][kHeadBlocks][2];           // B operands, columns by heads
using Logits = float[kTokenBlocks][kHeadBlocks][4];
using Probabilities = uint32[kTokenBlocks][kHeadBlocks][2];    // B operands, tokens by heads
using OfHeads = float[kHeadBlocks][2];

struct State {
  OfHeads row_max, row_sum;  // row_sum over the tokens of this lane
  float output[kColumnBlocks][kHeadBlocks][4];
};

struct Arguments {
  const uint16* q;
  int64 stride_q_row, stride_q_head;  // elements
  int query_type;                     // OutType
  const float *sinks, *kv_scale;      // or null
  void* out;
  float *lse, *partial;               // lse may be null
  float scale, cap;
  int rows, slots, group, out_type;
};

DEVICE int lane_row() { return threadIdx.x % 32 / 4; }
DEVICE int lane_column() { return threadIdx.x % 4 * 2; }

// Of the 16 columns of a block, the one of d[2 * half] and d[2 * half + 1]. FP8 values are transposed in pairs of columns.
DEVICE int column_of(int half) { return KV_FP8 ? 2 * lane_row() + half : lane_row() + 8 * half; }

DEVICE float max_of_column(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

DEVICE float sum_of_column(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// ---- Queries ------------------------------------------------------------------------------------------------------

#if KV_FP8
// A bfloat16 query in float16, times a power of 2 for each head that brings its largest element to the binade of 2^14:
// what underflows there is too small to matter beside it. `inverse` of head lane / 4 undoes that.
DEVICE void convert_query(Query& query, int block, float& inverse) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(query[i][block][j] << 16)),
                                     fabsf(__uint_as_float(query[i][block][j] & 0xffff0000u))));
  const uint32 exponent = min(268 - (__float_as_uint(max_of_quad(largest)) >> 23), 247u);
  const float power = __uint_as_float(exponent << 23);
  inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      query[i][block][j] = float16_pair(__uint_as_float(query[i][block][j] << 16) * power,
                                        __uint_as_float(query[i][block][j] & 0xffff0000u) * power);
}
#endif

// The query of a row, zeros for heads that the group does not have, and the factors of the logits of this lane's heads.
DEVICE void load_query(Query& query, OfHeads& factors, const Arguments& a, int row, int first_head, float factor) {
  // Of 16 columns, FP8 keys have four neighbours in a lane, others two and two.
  constexpr int kSecond = KV_FP8 ? 2 : 8;
#pragma unroll
  for (int b = 0; b < kHeadBlocks; ++b) {
    const int head = 8 * b + lane_row();
    const bool exists = head < a.group && uint32(row) < uint32(a.rows);
    const uint16* from = a.q + (exists ? row * a.stride_q_row + (first_head + head) * a.stride_q_head : 0);
    from += KV_FP8 ? 2 * lane_column() : lane_column();
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        query[i][b][j] = exists ? *reinterpret_cast<const uint32*>(from + 16 * i + j * kSecond) : 0;
    float inverse = 1;
#if KV_FP8
    if (a.query_type == kBFloat16) convert_query(query, b, inverse);
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h)
      factors[b][h] = KV_FP8 ? factor * __shfl_sync(~0u, inverse, 4 * (lane_column() + h)) : factor;
  }
}

// ---- Products -----------------------------------------------------------------------------------------------------

// The address of 16 bytes of this lane's row of a KV tile: chunk `chunk`, even, plus `odd`, of token `token`, a multiple of
// 8, plus the lane's row of 8.
DEVICE uint32 chunk_address(uint32 tile, int token, int chunk, int odd) {
  constexpr int kChunks = kRowBytes / 16;
  const int row = threadIdx.x % 8, swizzle = row * kRowBytes / 128 & (kChunks - 1);
  return tile + token / 8 * kGroupBytes + row * kRowBytes + chunk / kChunks * kBlockBytes +
         (((odd ^ swizzle) * 16) ^ (chunk % kChunks * 16));
}

// Sums of columns that are added at the end: products that add to one wait for each other.
constexpr int kSums = kTokenBlocks * kHeadBlocks == 1 ? 2 : 1;

// S = K Q^T of the warp's tokens.
DEVICE void multiply_keys(Logits& logits, uint32 keys, const Query& query) {
  const int lane = threadIdx.x % 32, upper = lane / 8 % 2 * 8, odd = lane / 16;
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t) {
    float sums[kSums][kHeadBlocks][4] = {};
#pragma unroll
    for (int i = 0; i < kDim * kElementBytes / 32; ++i) {
      uint32 k[4];
      load_matrices(k, chunk_address(keys, 16 * t + upper, 2 * i, odd));
#if KV_FP8
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 low = k[2 * half], high = k[2 * half + 1];
        const uint32 wide[4] = {widen<kKvType>(uint16(low)), widen<kKvType>(uint16(high)),
                                widen<kKvType>(uint16(low >> 16)), widen<kKvType>(uint16(high >> 16))};
#pragma unroll
        for (int b = 0; b < kHeadBlocks; ++b) multiply_add(sums[half % kSums][b], wide, query[2 * i + half][b]);
      }
#else
#pragma unroll
      for (int b = 0; b < kHeadBlocks; ++b) multiply_add(sums[i % kSums][b], k, query[i][b]);
#endif
    }
#pragma unroll
    for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) logits[t][b][j] = kSums == 1 ? sums[0][b][j] : sums[0][b][j] + sums[kSums - 1][b][j];
  }
}

// Ones in the halves of a word whose tokens, `token` and the next one, are in the range of a work item.
DEVICE uint32 mask_of_pair(const WorkItem& item, int token) {
  const uint32 count = item.end - item.begin, first = token - item.begin;
  return (first < count ? 0xffffu : 0) | (first + 1 < count ? 0xffff0000u : 0);
}

// O += V^T P of the warp's tokens, from token `first` on. Other tokens than the row sees are arbitrary memory, perhaps NaN:
// they are set to 0, since a probability of 0 times NaN is NaN.
DEVICE void multiply_values(State& state, uint32 values, const Probabilities& p, const WorkItem& item, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t) {
    const int token = first + 16 * t + lane_column();
    const uint32 mask[2] = {mask_of_pair(item, token), mask_of_pair(item, token + 8)};
#if KV_FP8
    const int upper = lane / 8 % 2 * 8, odd = lane / 16;
#pragma unroll
    for (int i = 0; i < kColumnBlocks / 2; ++i) {
      uint32 v[4];
      load_transposed(v, chunk_address(values, 16 * t + upper, 2 * i, odd));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 wide[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // a word has two columns of two tokens
          const uint32 columns = even_bytes_first(v[2 * half + j]);
          wide[2 * j] = widen<kKvType>(uint16(columns)) & mask[j];
          wide[2 * j + 1] = widen<kKvType>(uint16(columns >> 16)) & mask[j];
        }
#pragma unroll
        for (int b = 0; b < kHeadBlocks; ++b) multiply_add(state.output[2 * i + half][b], wide, p[t][b]);
      }
    }
#else
    const int upper = lane / 16 * 8, odd = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      uint32 v[4];
      load_transposed(v, chunk_address(values, 16 * t + upper, 2 * i, odd));
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] &= mask[j / 2];
#pragma unroll
      for (int b = 0; b < kHeadBlocks; ++b) multiply_add(state.output[i][b], v, p[t][b]);
    }
#endif
  }
}

// ---- Online softmax -----------------------------------------------------------------------------------------------

DEVICE void soft_cap(Logits& logits, float cap) {
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
    for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = logits[t][b][i];
        x = cap * (fabsf(x) <= kSmallTanh ? tanh_small(x) : tanh_exact(x));
      }
}

// One more part of a KV tile, from token `first` on: logits become probabilities, and the state is relative to the new
// maxima. `cap` is that of base-2 logits, whose `factors` then include its inverse.
DEVICE void softmax(Logits& logits, Probabilities& p, State& state, const OfHeads& factors, float cap,
                    const WorkItem& item, int first) {
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
    for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[t][b][i] *= factors[b][i % 2];
  if (cap > 0) soft_cap(logits, cap);
  OfHeads alpha;
  bool grows = false;
#pragma unroll
  for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -kInfinity;
#pragma unroll
      for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = logits[t][b][2 * half + h];
          const uint32 token = first + 16 * t + 8 * half + lane_row() - item.begin;
          if (token >= uint32(item.end - item.begin)) x = -kInfinity;
          largest = fmaxf(largest, x);
        }
      const float row_max = fmaxf(state.row_max[b][h], max_of_column(largest)), anchor = finite(row_max);
      alpha[b][h] = exp2_approx(state.row_max[b][h] - anchor);
      grows |= alpha[b][h] != 1;
      state.row_max[b][h] = row_max;
      float sum = state.row_sum[b][h] * alpha[b][h];
#pragma unroll
      for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = logits[t][b][2 * half + h];
          x = exp2_approx(x - anchor);
          sum += x;
        }
      state.row_sum[b][h] = sum;
    }
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
    for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        p[t][b][half] = transpose(pack(logits[t][b][2 * half], logits[t][b][2 * half + 1]));
  if (!__any_sync(~0u, grows)) return;
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i)
#pragma unroll
    for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) state.output[i][b][j] *= alpha[b][j % 2];
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------

// Accumulators of the four warps in shared memory. Columns are swizzled, so that the lanes of a store use all banks.
struct Exchange {
  float values[kWarps][kHeads][kDim];

  DEVICE static int at(int head, int column) { return column ^ (head / 2 % 4 * 8); }
};

DEVICE void share(const State& state, Exchange& exchange, Shared& shared) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 8 * b + lane_column() + h;
      const float sum = sum_of_column(state.row_sum[b][h]);
      if (lane_row() == 0) shared.row_max[warp][head] = state.row_max[b][h], shared.row_sum[warp][head] = sum;
#pragma unroll
      for (int i = 0; i < kColumnBlocks; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          exchange.values[warp][head][Exchange::at(head, 16 * i + column_of(half))] = state.output[i][b][2 * half + h];
    }
}

// Stores output and LSE of a row, or the partial result of a split. Threads have four columns of one head each.
DEVICE void store(const Arguments& a, const WorkItem& item, bool empty, int first_head, int num_heads,
                  const Exchange& exchange, const Shared& shared) {
  const bool whole = item.slot < 0;
  if (whole ? uint32(item.row) >= uint32(a.rows) : item.slot >= a.slots) return;
  const int64 row = int64(whole ? item.row : item.slot) * num_heads + first_head;
  const float value_scale = a.kv_scale ? a.kv_scale[1] : 1.f;
  float* lse = whole ? a.lse : a.partial + int64(a.slots) * num_heads * kDim;
  for (int i = threadIdx.x; i < a.group * (kDim / 4); i += kConsumerThreads) {
    const int head = i / (kDim / 4), column = i % (kDim / 4) * 4;
    RowState state;
    if (!empty) {
      float maxima[kWarps], sums[kWarps], values[kWarps][4];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const uint4 x = load_shared(shared_address(&exchange.values[w][head][Exchange::at(head, column)]));
        maxima[w] = shared.row_max[w][head], sums[w] = shared.row_sum[w][head];
        values[w][0] = __uint_as_float(x.x), values[w][1] = __uint_as_float(x.y);
        values[w][2] = __uint_as_float(x.z), values[w][3] = __uint_as_float(x.w);
      }
      state.add(maxima, sums, values);
    }
    if (a.sinks && whole) state.add_sink(a.sinks[first_head + head]);  // the combine adds it to rows that are split
    if (column == 0 && lse) lse[row + head] = state.lse();
    state.normalize(value_scale);
    const int64 index = (row + head) * kDim + column;
    if (whole) {
      store_four(a.out_type, a.out, index, state.values);
    } else if (reinterpret_cast<uint64>(a.partial) % 16 == 0) {
      store_four<kFloat32>(a.partial, index, state.values);
    } else {  // a workspace may lie at any multiple of 4 bytes
#pragma unroll
      for (int j = 0; j < 4; ++j) a.partial[index + j] = state.values[j];
    }
  }
}

// Four warps: attention of all work items. Each has a quarter of the tokens of every KV tile, and a state of its own.
DEVICE void consume(const Problem& p, const Arguments& a, bool early, Shared& shared) {
  const int warp = threadIdx.x / 32, first_head = kv_head() * a.group, num_heads = num_kv_heads() * a.group;
  WorkList list(p);
  WorkItem item = list.first;
  end_prologue(early);
  const float cap = a.cap > 0 ? a.cap * kLog2e : 0.f;
  const float factor = a.scale * (a.cap > 0 ? 1 / a.cap : kLog2e) * (a.kv_scale ? a.kv_scale[0] : 1.f);
  uint32 tile = 0;
  while (list.item < list.stop) {
    Query query;
    OfHeads factors;
    load_query(query, factors, a, item.row, first_head, factor);
    const WorkItem next = read_item(p, ++list.item, list.stop);
    State state;
#pragma unroll
    for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) state.row_max[b][h] = -kInfinity, state.row_sum[b][h] = 0;
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i)
#pragma unroll
      for (int b = 0; b < kHeadBlocks; ++b)
#pragma unroll
        for (int j = 0; j < 4; ++j) state.output[i][b][j] = 0;
    uint32 stage = 0;
    for (int first = item.first; first < item.end; first += kTile, ++tile) {
      stage = tile % kStages;
      const uint32 parity = tile / kStages & 1, part = warp * (kWarpTokens / 8 * kGroupBytes);
      Logits logits;
      Probabilities probabilities;
      wait(shared_address(&shared.k_full[stage]), parity);
      multiply_keys(logits, shared_address(shared.stages[stage].keys) + part, query);
      softmax(logits, probabilities, state, factors, cap, item, first + warp * kWarpTokens);
      wait(shared_address(&shared.v_full[stage]), parity);
      multiply_values(state, shared_address(shared.stages[stage].values) + part, probabilities, item,
                      first + warp * kWarpTokens);
      if (first + kTile < item.end) arrive_by_warp(shared_address(&shared.empty[stage]));
    }
    const bool empty = item.end == 0;
    Exchange& exchange = *reinterpret_cast<Exchange*>(&shared.stages[stage]);
    if (!empty) {
      named_sync(kAllConsumers, kConsumerThreads);  // all have read the last tile
      share(state, exchange, shared);
      named_sync(kAllConsumers, kConsumerThreads);
    }
    store(a, item, empty, first_head, num_heads, exchange, shared);
    if (!empty) {
      fence_async_shared();  // TMA writes here next
      arrive_by_warp(shared_address(&shared.empty[stage]));
    }
    item = next;
  }
}

}  // namespace
}  // namespace attn_ops
