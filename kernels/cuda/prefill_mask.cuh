// Prefill: packed custom masks. A mask has a bit for each query row and KV token of a request: rows one after another,
// the lowest bit of a byte first. Each request begins at a whole byte. Tokens without a bit, beyond the last byte, are
// hidden.
#pragma once

#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

// Bits of the mask from bit `bit` on, WORDS words of 32.
template <int WORDS>
struct MaskBits {
  const unsigned char* mask;
  int64 bytes, byte;  // of the mask, and where its aligned word with the first bit begins
  int shift;
  bool inside;        // of the mask are all words

  DEVICE MaskBits(const Problem& p, int64 bit) : mask(p.mask), bytes(p.mask_bytes) {
    const int before = static_cast<int>(reinterpret_cast<uint64>(p.mask) % 4);  // bytes of the first aligned word
    bit += before * 8;
    byte = (bit >> 5) * 4 - before, shift = bit & 31;
    inside = byte >= 0 && byte + 4 * (WORDS + 1) <= bytes;
  }

  // Aligned word `i`, of which bits outside of the mask are 0.
  DEVICE uint32 aligned_word(int i) const {
    if (inside) return reinterpret_cast<const uint32*>(mask + byte)[i];
    uint32 word = 0;
    for (int j = 0; j < 4; ++j) {
      const int64 at = byte + 4 * i + j;
      if (at >= 0 && at < bytes) word |= uint32(mask[at]) << 8 * j;
    }
    return word;
  }

  // The 32 bits that begin in aligned word `low`, which `high` follows.
  DEVICE uint32 joined(uint32 low, uint32 high) const {
    return static_cast<uint32>(((uint64(high) << 32) | low) >> shift);
  }
};

// A bit for each of 32 tokens that is before token `end`.
DEVICE uint32 tokens_before(int end) { return end >= 32 ? ~0u : end <= 0 ? 0 : (1u << end) - 1; }

// One warp: the mask of a unit, of which `row` is the first query row, among those of all requests.
DEVICE UnitMask mask_of(const Problem& p, int request, int row) {
  if (!p.kv_len) return {int64(row) * p.kv_rows, p.kv_rows};
  if (uint32(request) >= uint32(p.max_batch)) return {};
  int64 bytes = 0;  // of the requests before
  for (int b = threadIdx.x % 32; b < request; b += 32)
    bytes += (int64(p.qo_indptr[b + 1] - p.qo_indptr[b]) * p.kv_len[b] + 7) / 8;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) bytes += __shfl_xor_sync(~0u, bytes, lanes);
  const int stride = p.kv_len[request];
  return {8 * bytes + int64(row - p.qo_indptr[request]) * stride, stride};
}

// This warp's copy in shared memory, where it takes no registers.
DEVICE UnitMask& own_mask(Shared& shared) { return shared.masks[threadIdx.x / 32]; }

DEVICE void store_mask(const UnitMask& mask, Shared& shared) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) own_mask(shared) = mask;
  __syncwarp();
}

// One warp, before `seen_tokens`.
DEVICE void store_mask(const Problem& p, const Unit& unit, Shared& shared) {
  UnitMask mask = mask_of(p, unit.request, unit.row + unit.first_row);
  mask.rows = min((unit.first_packed_row + p.block_rows() - 1) / p.group, unit.count - 1) - unit.first_row + 1;
  mask.low = relative_bound(unit.position, unit.first_row, -p.window_left, kBeforeAll);
  mask.high = relative_bound(unit.position, unit.first_row + 1, p.window_right, kMaxTokens);
  mask.end = unit.end;
  store_mask(mask, shared);
}

// One warp: of 32 * WORDS tokens from `token` on, those that a query row of the unit sees. Lane l has the bits of those
// from 32 * (l % WORDS) on.
template <int WORDS>
DEVICE uint32 seen_tokens(const Problem& p, const UnitMask& mask, int token) {
  const int lane = threadIdx.x % 32, end = mask.end;
  uint32 seen = 0;
  token += lane % WORDS * 32;
  for (int row = lane / WORDS; row < mask.rows; row += 32 / WORDS) {
    const MaskBits<1> bits(p, mask.first + int64(row) * mask.stride + token);
    seen |= bits.joined(bits.aligned_word(0), bits.aligned_word(1)) &
            tokens_before(min(mask.high + row, end) - token) & ~tokens_before(mask.low + row - token);
  }
#pragma unroll
  for (int lanes = WORDS; lanes < 32; lanes *= 2) seen |= __shfl_xor_sync(~0u, seen, lanes);
  return seen;
}

}  // namespace
}  // namespace attn_ops
