// Prefill: packed custom masks. A mask has a bit for each query row and KV token of a request: row after row, the
// lowest bit of a byte first. With a plan each request begins at a whole byte. Tokens whose bit would be after the last
// byte are hidden.
#pragma once

#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

// Loads 32 * WORDS bits from bit `bit` on. Bits outside of the mask are 0.
template <int WORDS>
DEVICE void load_bits(const Problem& p, int64 bit, uint32 (&bits)[WORDS]) {
  const int before = static_cast<int>(reinterpret_cast<uint64>(p.mask) % 4);  // bytes from an aligned word to the mask
  bit += before * 8;
  const int64 byte = (bit >> 5) * 4 - before;  // byte of the mask at which the aligned word with the first bit begins
  uint32 words[WORDS + 1];
  if (byte >= 0 && byte + 4 * (WORDS + 1) <= p.mask_bytes) [[likely]] {
    const uint32* from = reinterpret_cast<const uint32*>(p.mask + byte);
#pragma unroll
    for (int i = 0; i <= WORDS; ++i) words[i] = from[i];
  } else {
#pragma unroll
    for (int i = 0; i <= WORDS; ++i) {
      words[i] = 0;
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
        const int64 at = byte + 4 * i + j;
        if (at >= 0 && at < p.mask_bytes) words[i] |= uint32(p.mask[at]) << 8 * j;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    bits[i] = static_cast<uint32>(((uint64(words[i + 1]) << 32) | words[i]) >> (bit & 31));
}

// As load_bits, where all aligned words with these bits are inside of the mask. There is no branch, so that the loads
// of several calls overlap.
template <int WORDS>
DEVICE void load_inner_bits(const Problem& p, int64 bit, uint32 (&bits)[WORDS]) {
  const uint64 address = reinterpret_cast<uint64>(p.mask);
  bit += address % 4 * 8;
  const uint32* from = reinterpret_cast<const uint32*>(address / 4 * 4) + (bit >> 5);
  uint32 words[WORDS + 1];
#pragma unroll
  for (int i = 0; i <= WORDS; ++i) words[i] = from[i];
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    bits[i] = static_cast<uint32>(((uint64(words[i + 1]) << 32) | words[i]) >> (bit & 31));
}

// A bit for each of 32 tokens: 1 if the token is before token `end`.
DEVICE uint32 tokens_before(int end) { return end >= 32 ? ~0u : end <= 0 ? 0 : (1u << end) - 1; }

// One warp: `first` and `stride` of the mask of a unit whose first query row is row `row` of `q`.
DEVICE UnitMask mask_of(const Problem& p, int request, int row) {
  if (!p.kv_len) return {int64(row) * p.request_keys, p.request_keys};
  if (uint32(request) >= uint32(p.max_batch)) return {};
  const auto wide = [](int x) { return uint64(int64(x)); };  // products of uint64 wrap, for any contents of a plan
  uint64 bytes = 0;                                          // bytes of the masks of the requests before
  for (int b = threadIdx.x % 32; b < request; b += 32)
    bytes += ((wide(p.qo_indptr[b + 1]) - wide(p.qo_indptr[b])) * wide(p.kv_len[b]) + 7) / 8;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) bytes += __shfl_xor_sync(~0u, bytes, lanes);
  const int stride = p.kv_len[request];
  const uint64 first = 8 * bytes + (wide(row) - wide(p.qo_indptr[request])) * wide(stride), end = 8 * p.mask_bytes;
  if (first >= end || stride < 0) return {int64(end), 0};  // the mask has no bit of these rows
  return {int64(first), stride};
}

// This warp's copy of the UnitMask, in shared memory, where it takes no registers.
DEVICE UnitMask& own_mask(Shared& shared) { return shared.masks[threadIdx.x / 32]; }

DEVICE void store_mask(const UnitMask& mask, Shared& shared) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) own_mask(shared) = mask;
  __syncwarp();
}

// One warp: stores all fields of the unit's mask, for `seen_tokens` and `Scan`.
DEVICE void store_mask(const Problem& p, const Unit& unit, Shared& shared) {
  UnitMask mask = mask_of(p, unit.request, unit.row + unit.first_row);
  mask.rows = min((unit.first_packed_row + p.block_rows() - 1) / p.group, unit.count - 1) - unit.first_row + 1;
  mask.low = relative_bound(unit.position, unit.first_row, -p.window_left, kBeforeAll);
  mask.high = relative_bound(unit.position, unit.first_row + 1, p.window_right, kMaxTokens);
  mask.end = unit.end;
  store_mask(mask, shared);
}

// One warp: which of the 32 * WORDS tokens from `token` on any query row of the unit sees, a bit for each. Lane l has
// the bits of the 32 tokens from 32 * (l % WORDS) on. In most masks a few rows together see all tokens: the loop then
// ends.
template <int WORDS>
DEVICE uint32 seen_tokens(const Problem& p, const UnitMask& mask, int token) {
  const int lane = threadIdx.x % 32;
  token += lane % WORDS * 32;
  const uint32 beyond = ~tokens_before(mask.end - token);
  uint32 seen = 0;
  for (int first = 0; first < mask.rows && __any_sync(~0u, (seen | beyond) != ~0u); first += 32 / WORDS) {
    const int row = min(first + lane / WORDS, mask.rows - 1);
    uint32 bits[1];
    load_bits(p, mask.first + int64(row) * mask.stride + token, bits);
    seen |= bits[0] & tokens_before(mask.high + row - token) & ~tokens_before(mask.low + row - token);
#pragma unroll
    for (int lanes = WORDS; lanes < 32; lanes *= 2) seen |= __shfl_xor_sync(~0u, seen, lanes);
  }
  return seen & ~beyond;
}

constexpr int kTreeRows = 128;  // a mask of at most so many query rows is taken for a tree of draft tokens

DEVICE int rows_of_request(const Problem& p, int request) {
  if (!p.kv_len) return p.request_rows;
  if (uint32(request) >= uint32(p.max_batch)) return 0;
  return int(uint32(p.qo_indptr[request + 1]) - uint32(p.qo_indptr[request]));  // wraps, for any contents of a plan
}

// One warp: looks for KV tiles with a token that the mask lets any query row of the unit see. The window is the union
// of the windows of all rows.
struct Scan {
  static constexpr int kRows = kProducerRegisters > 40 ? 4 : 2;  // rows read at once
  static constexpr int kWords = 2, kLaneTokens = 32 * kWords, kTokens = 32 * kLaneTokens;
  static constexpr int kTileLanes = kTile / kLaneTokens;
  static constexpr uint32 kFirstTile = (1u << kTileLanes) - 1;

  const Problem& p;
  const UnitMask& mask;
  int begin, end;  // tokens that the window lets some row see
  bool inside;     // all words that are read are inside of the mask

  DEVICE Scan(const Problem& p, const UnitMask& mask, const Unit& unit)
      : p(p), mask(mask), begin(max(unit.start, mask.low)), end(min(unit.end, mask.high + mask.rows - 1)) {
    const int64 last_bit = mask.first + int64(mask.rows - 1) * mask.stride + unit.end + kTokens;
    inside = mask.first + unit.start >= 32 && last_bit + 64 <= 8 * p.mask_bytes;
  }

  // A bit for each lane: 1 if a row sees one of the lane's kLaneTokens tokens from `token` on. Reads rows until a token
  // of the lanes in `some` is seen, and a token of the lanes in `others`; later rows may set more bits.
  DEVICE uint32 lanes(int token, uint32 some, uint32 others) const {
    uint32 found = 0;
    for (int first = 0; first < mask.rows && !(found & some && found & others); first += kRows) {
      uint32 bits[kRows][kWords];
      const auto bit_of = [&](int i) {
        return mask.first + token + int64(min(first + i, mask.rows - 1)) * mask.stride;
      };
      if (inside) [[likely]] {
#pragma unroll
        for (int i = 0; i < kRows; ++i) load_inner_bits(p, bit_of(i), bits[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) load_bits(p, bit_of(i), bits[i]);
      }
      uint32 seen = 0;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int from = token + 32 * word;
        uint32 of_rows = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) of_rows |= bits[i][word];
        seen |= of_rows & tokens_before(end - from) & ~tokens_before(begin - from);
      }
      found |= __ballot_sync(~0u, seen);
    }
    return found;
  }

  // The first token of the first KV tile in [first, last) that a row sees; `last` if there is none.
  DEVICE int first_tile(int first, int last, int lane) const {
    for (; first < last; first += kTokens) {
      const uint32 seen = lanes(first + kLaneTokens * lane, kFirstTile, ~0u);
      if (seen) return first + (__ffs(seen) - 1) / kTileLanes * kTile;
    }
    return last;
  }

  // The end of the last KV tile in [first, last) that a row sees, at most `last`; `first` if there is none.
  DEVICE int last_tile(int first, int last, int lane) const {
    for (int token = first + (last - first - 1) / kTokens * kTokens; token >= first; token -= kTokens) {
      const uint32 tile = kFirstTile << min(last - token - 1, kTokens - 1) / kTile * kTileLanes;
      const uint32 seen = lanes(token + kLaneTokens * lane, tile, ~0u);
      if (seen) return min(last, token + ((31 - __clz(seen)) / kTileLanes + 1) * kTile);
    }
    return first;
  }
};

// One warp: limits the KV tokens of a unit to the KV tiles from the first to the last that a query row sees. Many masks
// hide neither the first nor the last KV tile of the unit: both are looked at together, before others.
//
// Does nothing for requests of at most kTreeRows query rows: their masks are trees of draft tokens, which hide none of
// the tokens before the tree, and to find that out takes longer than a KV tile.
DEVICE void skip_hidden_ends(const Problem& p, Unit& unit, Shared& shared) {
  if (rows_of_request(p, unit.request) <= kTreeRows) return;
  store_mask(p, unit, shared);
  int first = unit.start, last = unit.end;
  if (first >= last) return;
  const Scan scan(p, own_mask(shared), unit);
  constexpr uint32 kFirstLanes = 0xFFFF;
  const int lane = threadIdx.x % 32, end_tile = first + (last - first - 1) / kTile * kTile;
  const int tile = kFirstLanes >> lane & 1 ? first : end_tile;
  const uint32 seen = scan.lanes(tile + lane % Scan::kTileLanes * Scan::kLaneTokens, kFirstLanes, ~kFirstLanes);
  if (!(seen & kFirstLanes)) first = scan.first_tile(first, last, lane);
  if (!(seen & ~kFirstLanes)) last = scan.last_tile(first, last, lane);
  __syncwarp();
  if (lane == 0) unit.start = first < last ? first : unit.start, unit.end = first < last ? last : unit.start;
}

}  // namespace
}  // namespace attn_ops
