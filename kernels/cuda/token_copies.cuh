// Copies of KV tiles token by token, by cp.async, for pages of any size: TMA would need a box for each token.
#pragma once

#include "division.cuh"
#include "hopper.cuh"

namespace attn_ops {
namespace {

// Keys or values of one KV head in global memory. Strides are in bytes.
struct TokenSource {
  const char* first;
  int64 page, token;

  DEVICE TokenSource from_byte(int64 offset) const { return {first + offset, page, token}; }
};

// The tokens of a request. `Problem` has kv_indices, max_pages, num_pages and page_size.
struct PagedTokens {
  FastDivide by_page;
  int page_start, end;  // index of the request's first page in kv_indices; tokens from `end` on are not read

  template <class Problem>
  DEVICE uint32 page_of(const Problem& p, int token) const {
    if (token >= end) return 0;
    const uint32 index = uint32(page_start) + by_page.quotient(token);
    return index < uint32(p.max_pages) ? p.kv_indices[index] : 0;
  }
};

// One warp: TOKENS tokens of a KV tile, from `first` on. The tokens of the next tile begin STEP tokens later. Lane l
// has the page numbers of tokens first + l, first + l + 32 and so on.
//
// ADDRESSES addresses have registers of their own. A cp.async reads its address register late: another address in the
// same register would have to wait for the copy.
template <int TOKENS, int STEP, int ADDRESSES>
struct TileTokens {
  static constexpr int kOwn = TOKENS / 32;

  const PagedTokens& request;
  int first;
  uint32 pages[kOwn];

  template <class Problem>
  DEVICE TileTokens(const Problem& p, const PagedTokens& request, int first) : request(request), first(first) {
    load_pages(p);
  }

  // Goes on to the next tile. Its page numbers are loaded while the copies of the current tile run.
  template <class Problem>
  DEVICE void advance(const Problem& p) {
    first += STEP;
    load_pages(p);
  }

  template <class Problem>
  DEVICE void load_pages(const Problem& p) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) pages[i] = request.page_of(p, first + 32 * i + threadIdx.x % 32);
  }

  // Copies BLOCKS * ROW_BYTES bytes of each token to a row of a swizzled tile. Writes zeros for tokens from the end on,
  // and for those of tokens 32 i to 32 i + 31 whose bits in `seen(i)` are 0. `group(g)` is the address of group g of 8
  // tokens; blocks of columns are BLOCK_BYTES apart. A row has kChunks chunks of 16 bytes, and kChunks lanes copy
  // kChunks consecutive tokens. Chunks from byte `end` of a token on are zeros. The warp reconverges first: diverged,
  // it would issue each copy twice.
  template <int BLOCKS, int ROW_BYTES, int BLOCK_BYTES, class Problem, class Group, class Seen>
  DEVICE void copy_rows(const Problem& p, const TokenSource& from, Group group, Seen seen,
                        int end = BLOCKS * ROW_BYTES) const {
    constexpr int kChunks = ROW_BYTES / 16, kAtOnce = ADDRESSES < kChunks ? ADDRESSES : kChunks;
    const int lane = threadIdx.x % 32, first_row = lane / kChunks * kChunks;
    const auto swizzle = [](int row) { return (row * ROW_BYTES / 128 & (kChunks - 1)) * 16; };
    const uint32 in_group = first_row % 8 * ROW_BYTES + (lane % kChunks * 16 ^ swizzle(first_row % 8));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int token = first + 32 * i + lane;
      const uint32 page = min(pages[i], uint32(p.num_pages) - 1);
      const int64 offset = page * from.page + request.by_page.remainder(token) * from.token;
      const uint64 own = reinterpret_cast<uint64>(from.first + (token < request.end ? offset : 0));
      const uint32 existing = (__ballot_sync(~0u, token < request.end) & seen(i)) >> first_row;
      const uint32 to = group(i * 4 + first_row / 8) + in_group;
#pragma unroll
      for (int row = 0; row < kChunks; row += kAtOnce) {
        uint64 addresses[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) addresses[j] = __shfl_sync(~0u, own, row + j, kChunks) + lane % kChunks * 16;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const char* from_row = reinterpret_cast<const char*>(addresses[j]);
          const uint32 to_row = (to ^ swizzle(row + j)) + (row + j) * ROW_BYTES;
#pragma unroll
          for (int block = 0; block < BLOCKS; ++block) {
            const bool in_row = block * ROW_BYTES + lane % kChunks * 16 < end;
            copy_chunk(to_row + block * BLOCK_BYTES, from_row + block * ROW_BYTES,
                       in_row && existing >> (row + j) & 1);
          }
        }
      }
    }
  }

  // As above, with all tokens before the end.
  template <int BLOCKS, int ROW_BYTES, int BLOCK_BYTES, class Problem, class Group>
  DEVICE void copy_rows(const Problem& p, const TokenSource& from, Group group) const {
    copy_rows<BLOCKS, ROW_BYTES, BLOCK_BYTES>(p, from, group, [](int) { return ~0u; });
  }
};

}  // namespace
}  // namespace attn_ops
