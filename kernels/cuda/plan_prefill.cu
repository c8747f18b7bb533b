// Prefill plans: the work items of a batch, longest first, with splits for load balance or of a fixed size.
//
// CTA 0 makes the work list, in steps between which its threads meet at __syncthreads:
//     1. The query tiles of each request, and their inclusive sums over the requests, in shared memory.
//     2. The totals over all tiles, and from them which tiles may be split (`divided`, a bit of each tile).
//     3. The split: of kCandidates lengths the one with the least estimated time, or the fixed one.
//     4. The longest item, and the items of each length bucket.
//     5. The items: a stable counting sort by bucket.
// A thread has every kThreads-th tile, and computes its fields again in each step; those of its first tile it keeps.
// Lane i of a warp also has candidate i in step 3, and bucket i in steps 4 and 5.
//
// kernels/reference/plan.py says what the integers mean. Macros are THREADS, ONE_CHUNK if each thread has one tile at
// most, MAX_REQUESTS and MAX_ITEMS of a plan, COPY_PAGES, and the constants of attn_ops/plan/state.py.
#include "basics.cuh"
#include "schedule.cuh"

namespace attn_ops {
namespace {

constexpr int kThreads = THREADS, kWarps = kThreads / 32;
constexpr int kBlock = KV_BLOCK, kBuckets = LENGTH_BUCKETS, kCandidates = SPLIT_CANDIDATES;
constexpr int kNotSplit = 1 << 30;       // KV blocks of the longest split of a tile that is not split
constexpr int kPagesOfCta = COPY_PAGES;  // page numbers that a CTA copies
static_assert(kBuckets == 32 && kCandidates == 32);

enum SplitTile { kTileRow, kTileRows, kTileSlot, kTileSlots, kSplitTileStride };

struct Shared {
  int tiles_end[MAX_REQUESTS];  // inclusive sums of the query tiles of requests
  int qo_len[MAX_REQUESTS], kv_len[MAX_REQUESTS];
  uint32 divided[MAX_ITEMS / 32];
  int of_warp[2][kWarps], splits_of_warp[2][kWarps];  // for scans; two, so that a step needs one barrier
  int64 total[kWarps];
  int longest[kWarps], longest_blocks[kWarps];
  int counts[2][kWarps][kBuckets];
  int of_candidate[4][kWarps][kCandidates];
};

// The plan, its capacities and its problem: see attn_ops/plan/state.py.
struct Problem {
  int batch, max_batch, max_pages, max_items, max_split_tiles;
  int wave;  // query tiles that the device computes at a time
  int page_size, tile_rows, window, ahead;
  int ctas, cluster_splits;  // CTAs of a query tile, and those that divide its KV
  int split_blocks;          // KV blocks of a split of fixed size; 0: splits are for load balance
  int rank, world, interleave;
  const int* seq_lens;

  // Element i of qo_indptr as the plan has it: as many rows as the tiles hold however they are divided into requests.
  // Attention writes zeros to the rest.
  DEVICE int row_at(const int* qo_indptr, int i) const {
    const int max_rows = int(uint32(max_items - max_batch - 2 * max_split_tiles) * uint32(tile_rows));
    return min(max(qo_indptr[min(i, batch)], 0), max_rows);
  }
};

DEVICE int ceil_div(int x, int y) { return x / y + (x % y > 0); }

// A quotient of numbers that are not negative. A division of 64 bits takes several times as long as one of 32.
DEVICE int64 divide(int64 x, int64 y) { return (x | y) >> 32 ? x / y : int64(uint32(x) / uint32(y)); }
DEVICE int64 ceil_div(int64 x, int64 y) { return divide(x + y - 1, y); }

// ---- Scans and reductions of a warp -------------------------------------------------------------------------------

DEVICE int lane_of_thread() { return threadIdx.x % 32; }
DEVICE int warp_of_thread() { return threadIdx.x / 32; }

DEVICE int inclusive_sum(int x) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_sync(~0u, x, max(lane - d, 0));
    if (lane >= d) x += before;
  }
  return x;
}

template <class T>
DEVICE T sum_of_warp(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

DEVICE int max_of_warp(int x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// The sum of `of_warp[w]` over the warps before this one, and over all.
DEVICE int sum_before(const int (&of_warp)[kWarps], int& total) {
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp_of_thread()) before = total;
    total += of_warp[w];
  }
  return before;
}

// The largest x of the CTA. `of_warp` is of this call alone.
DEVICE int max_of_cta(int x, int (&of_warp)[kWarps]) {
  x = max_of_warp(x);
  if (lane_of_thread() == 0) of_warp[warp_of_thread()] = x;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) x = max(x, of_warp[w]);
  return x;
}

// ---- Query tiles --------------------------------------------------------------------------------------------------

// The rank's tokens before `position`; with one rank `position`, also if it is negative.
DEVICE int tokens_before(const Problem& p, int position) {
  if (p.world == 1) return position;
  position = max(position, 0);
  const int turn = p.interleave * p.world, rest = position % turn - p.rank * p.interleave;
  return position / turn * p.interleave + min(max(rest, 0), p.interleave);
}

struct Tile {
  bool used = false;
  int request = 0, offset = 0, rows = 0, position = 0, begin = 0, end = 0;

  DEVICE int first_block() const { return begin / kBlock; }
  DEVICE int blocks() const { return end > begin ? (end - 1) / kBlock + 1 - first_block() : 0; }
  DEVICE int length() const { return end - begin; }
};

// Query tile `tile` of the batch, in the order of requests.
DEVICE Tile locate(const Problem& p, const Shared& shared, int tile, int num_tiles) {
  Tile t;
  t.used = tile < num_tiles;
  if (!t.used) return t;
  int low = 0, high = p.max_batch - 1;  // the first request whose tiles end after this one
  while (low < high) {
    const int middle = (low + high) / 2;
    if (shared.tiles_end[middle] > tile)
      high = middle;
    else
      low = middle + 1;
  }
  t.request = low;
  const int qo = shared.qo_len[low], kv = shared.kv_len[low], whole = p.world > 1 ? p.seq_lens[low] : kv;
  t.offset = (tile - (low > 0 ? shared.tiles_end[low - 1] : 0)) * p.tile_rows;
  t.rows = min(qo - t.offset, p.tile_rows);
  t.position = whole - qo + t.offset;
  t.end = kv;
  if (p.ahead) {
    const int hidden = max(qo - t.offset - (p.tile_rows + p.ahead - 1), 0);  // keys after those of the last row
    t.end = max(tokens_before(p, whole - hidden), 0);
    if (p.world > 1) t.end = min(t.end, kv);
  }
  if (p.window) t.begin = min(max(tokens_before(p, t.position + 1 - p.window), 0), t.end);
  return t;
}

// The bucket of a length in tokens, 0 for the longest; kBuckets for an unused tile.
DEVICE int bucket_of(bool used, int length, int longest) {
  if (!used) return kBuckets;
  return kBuckets - 1 - int(divide(int64(length) * kBuckets, int64(longest) + 1));
}

// The lanes whose `bucket` is `own`, of those with a bucket below kBuckets.
DEVICE uint32 lanes_of_bucket(int bucket, int own) {
  uint32 lanes = __ballot_sync(~0u, bucket < kBuckets);
#pragma unroll
  for (int bit = 1; bit < kBuckets; bit *= 2) {
    const uint32 set = __ballot_sync(~0u, bucket & bit);
    lanes &= own & bit ? set : ~set;
  }
  return lanes;
}

// How a tile is divided.
struct Division {
  int splits;  // 1 for a tile that is not split, 0 for an unused one
  int length;  // tokens of the longest split

  DEVICE Division(const Problem& p, const Tile& t, bool divided, int split_blocks)
      : splits(t.used), length(t.used ? t.length() : 0) {
    const int blocks = t.blocks();
    if (!divided || blocks <= split_blocks) return;
    splits = ceil_div(blocks, split_blocks);
    length = (p.split_blocks ? split_blocks : ceil_div(blocks, splits)) * kBlock;
  }
};

// Calls of_chunk(first, tile) for this thread's tile of each chunk of kThreads tiles, from tile `first` of the batch
// on. All threads take part in each. `own` is the tile of the first chunk, with ONE_CHUNK the only one.
template <class Function>
DEVICE void for_each_chunk(const Problem& p, const Shared& shared, int num_tiles, const Tile& own,
                           const Function& of_chunk) {
  if (ONE_CHUNK) return of_chunk(0, own);
#pragma unroll 1
  for (int first = 0; first < num_tiles; first += kThreads)
    of_chunk(first, first == 0 ? own : locate(p, shared, first + int(threadIdx.x), num_tiles));
}

// ---- Step 1: requests ---------------------------------------------------------------------------------------------

struct Inputs {
  const int *qo_indptr, *kv_indptr, *last_page_len;
};

struct Outputs {
  int *qo_indptr, *kv_indptr, *kv_len, *work, *split_tiles, *queue;
};

// KV tokens of a request; page numbers and last page lengths out of range are clamped.
DEVICE int count_tokens(const Problem& p, int first_page, int end_page, int last_page_len) {
  const int pages = int(uint32(max(min(end_page, p.max_pages), 0)) - uint32(max(first_page, 0)));
  if (pages <= 0) return 0;
  return int(uint32(pages - 1) * uint32(p.page_size) + uint32(min(max(last_page_len, 1), p.page_size)));
}

// Reads the requests, and writes the fields of the plan that have one element for each. Returns the number of tiles.
DEVICE int read_requests(const Problem& p, const Inputs& in, const Outputs& out, Shared& shared) {
  int tiles = 0;
  for (int first = 0, parity = 0; first < p.max_batch; first += kThreads, parity ^= 1) {
    const int b = first + int(threadIdx.x);
    int of_request = 0;
    if (b < p.max_batch) {
      const int first_page = in.kv_indptr[min(b, p.batch)], end_page = in.kv_indptr[min(b + 1, p.batch)];
      const int kv_len = b < p.batch ? count_tokens(p, first_page, end_page, in.last_page_len[b]) : 0;
      const int first_row = p.row_at(in.qo_indptr, b), end_row = p.row_at(in.qo_indptr, b + 1);
      const int qo_len = max(end_row - first_row, 0);
      of_request = ceil_div(qo_len, p.tile_rows);
      shared.qo_len[b] = qo_len, shared.kv_len[b] = kv_len;
      out.kv_len[b] = kv_len, out.kv_indptr[b + 1] = end_page, out.qo_indptr[b + 1] = end_row;
      if (b == 0) out.kv_indptr[0] = first_page, out.qo_indptr[0] = first_row;
    }
    const int up_to = inclusive_sum(of_request);
    if (lane_of_thread() == 31) shared.of_warp[parity][warp_of_thread()] = up_to;
    __syncthreads();
    int of_chunk;
    const int before = sum_before(shared.of_warp[parity], of_chunk);
    if (b < p.max_batch) shared.tiles_end[b] = tiles + before + up_to;
    tiles += of_chunk;
  }
  __syncthreads();
  return min(tiles, p.max_items);
}

// ---- Steps 2 and 3: splits ----------------------------------------------------------------------------------------

struct Totals {
  int64 blocks;  // KV blocks of all tiles; of fixed splits: their number, of tiles with more than one
  int longest_blocks, longest;  // of a tile
};

// Which tiles may be split, longest first: those after `skip` tiles of bucket `first_bucket`.
struct FirstDivided {
  int bucket = kBuckets, skip = 0;
};

// The tiles that are left after as many whole waves as there are, unless one tile exceeds the work of a CTA: then all.
DEVICE FirstDivided first_divided(const Problem& p, Shared& shared, int num_tiles, const Tile& own, Totals totals) {
  if (p.wave * int64(totals.longest_blocks) > totals.blocks) return {-1, 0};
  if (num_tiles >= int64(p.wave) * BALANCE_WAVES) return {};
  int count = 0;
  for_each_chunk(p, shared, num_tiles, own, [&](int, const Tile& t) {
    count += __popc(lanes_of_bucket(bucket_of(t.used, t.length(), totals.longest), lane_of_thread()));
  });
  shared.counts[0][warp_of_thread()][lane_of_thread()] = count;
  __syncthreads();
  count = 0;
  for (int w = 0; w < kWarps; ++w) count += shared.counts[0][w][lane_of_thread()];
  const int up_to = inclusive_sum(count), in_whole_waves = num_tiles / p.wave * p.wave;
  const int bucket = __popc(__ballot_sync(~0u, up_to <= in_whole_waves));
  const int before = __shfl_sync(~0u, up_to, max(bucket - 1, 0));
  __syncthreads();  // the counts are read
  return {bucket, in_whole_waves - (bucket > 0 ? before : 0)};
}

// Sets the bits of the tiles that may be split. Each warp reads the words that it has written itself.
DEVICE void mark_divided(const Problem& p, Shared& shared, int num_tiles, const Tile& own, int longest,
                         FirstDivided from) {
  int before_chunk = 0, parity = 0;
  for_each_chunk(p, shared, num_tiles, own, [&](int first, const Tile& t) {
    const int bucket = bucket_of(t.used, t.length(), longest);
    bool divided = t.used && bucket > from.bucket;
    if (from.bucket >= 0) {
      const uint32 same = __ballot_sync(~0u, bucket == from.bucket && t.used);
      if (lane_of_thread() == 0) shared.of_warp[parity][warp_of_thread()] = __popc(same);
      __syncthreads();
      int of_chunk;
      const int before = before_chunk + sum_before(shared.of_warp[parity], of_chunk);
      const int place = before + __popc(same & ((1u << lane_of_thread()) - 1));
      divided |= same >> lane_of_thread() & 1 && place >= from.skip;
      before_chunk += of_chunk, parity ^= 1;
    }
    const uint32 word = __ballot_sync(~0u, divided);
    if (lane_of_thread() == 0) shared.divided[first / 32 + warp_of_thread()] = word;
  });
  __syncwarp();
}

// KV blocks of the longest split of the divided tiles. The estimate is the mean of all CTAs, or the time of those waves
// that have splits of more than 3/4, or 1/2, of the longest.
DEVICE int fastest_split(const Problem& p, Shared& shared, int num_tiles, const Tile& own) {
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const auto is_divided = [&](int first) { return shared.divided[first / 32 + warp] >> lane & 1; };
  int64 total = 0;
  int longest_blocks = 0;
  for_each_chunk(p, shared, num_tiles, own, [&](int first, const Tile& t) {
    if (is_divided(first)) total += t.blocks(), longest_blocks = max(longest_blocks, t.blocks());
  });
  total = sum_of_warp(total);
  if (lane == 0) shared.total[warp] = total;
  longest_blocks = max_of_cta(longest_blocks, shared.longest_blocks);
  total = 0;
  for (int w = 0; w < kWarps; ++w) total += shared.total[w];

  // A tile of b blocks in s splits has a longest one of ceil(b / s) blocks, which is more than x if b > s x.
  const int candidate = max(ceil_div(longest_blocks, ((4 + lane % 4) << lane / 4) >> 2), MIN_SPLIT_BLOCKS);
  const float inverse = reciprocal_approx(float(candidate));
  int items = 0, slots = 0, over_half = 0, over_three_quarters = 0;
  for_each_chunk(p, shared, num_tiles, own, [&](int first, const Tile& t) {
    const int blocks = t.blocks();
    for (uint32 left = shared.divided[first / 32 + warp]; left; left &= left - 1) {
      const int of_tile = __shfl_sync(~0u, blocks, __ffs(left) - 1);
      int splits = int(float(of_tile) * inverse);  // at most 225: may be two less than the quotient, rounded up
      splits += splits * candidate < of_tile, splits += splits * candidate < of_tile, splits = max(splits, 1);
      items += splits, slots += splits > 1 ? splits : 0;
      over_half += of_tile > splits * (candidate / 2) ? splits : 0;
      over_three_quarters += of_tile > splits * (candidate * 3 / 4) ? splits : 0;
    }
  });
  const int sums[4] = {items, slots, over_half, over_three_quarters};
#pragma unroll
  for (int i = 0; i < 4; ++i) shared.of_candidate[i][warp][lane] = sums[i];
  __syncthreads();
  int64 sum[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int w = 0; w < kWarps; ++w) sum[i] += shared.of_candidate[i][w][lane];

  const int64 of_longest = int64(ceil_div(candidate, p.cluster_splits)) * BLOCK_COST;
  int64 time = divide(divide(total * BLOCK_COST, p.cluster_splits) + sum[0] * ITEM_COST, p.wave);
  time = max(time, ceil_div(sum[3], int64(p.wave)) * (of_longest + ITEM_COST));
  time = max(time, ceil_div(sum[2], int64(p.wave)) * (of_longest * 3 / 4 + ITEM_COST));
  if (sum[1] > 0) time += sum[1] * p.ctas + COMBINE_COST;
  if (sum[1] > 2 * int64(p.max_split_tiles)) time = MAX_COST;
  time = time * kCandidates + lane;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) time = min(time, __shfl_xor_sync(~0u, time, mask));
  return __shfl_sync(~0u, candidate, int(time % kCandidates));
}

// Sets `divided`, and returns the KV blocks of the longest split of these tiles.
DEVICE int choose_splits(const Problem& p, Shared& shared, int num_tiles, const Tile& own) {
  Totals totals = {};
  for_each_chunk(p, shared, num_tiles, own, [&](int, const Tile& t) {
    const int blocks = t.blocks();
    if (!p.split_blocks)
      totals.blocks += blocks;
    else if (blocks > p.split_blocks)
      totals.blocks += ceil_div(blocks, p.split_blocks);
    totals.longest_blocks = max(totals.longest_blocks, blocks), totals.longest = max(totals.longest, t.length());
  });
  totals.blocks = sum_of_warp(totals.blocks), totals.longest_blocks = max_of_warp(totals.longest_blocks);
  if (lane_of_thread() == 0)
    shared.total[warp_of_thread()] = totals.blocks, shared.longest_blocks[warp_of_thread()] = totals.longest_blocks;
  totals.longest = max_of_cta(totals.longest, shared.longest);
  totals.blocks = 0;
  for (int w = 0; w < kWarps; ++w)
    totals.blocks += shared.total[w], totals.longest_blocks = max(totals.longest_blocks, shared.longest_blocks[w]);
  __syncthreads();  // the totals are read

  FirstDivided from;
  if (!p.split_blocks)
    from = first_divided(p, shared, num_tiles, own, totals);
  else if (totals.blocks <= 2 * int64(p.max_split_tiles))
    from.bucket = -1;
  if (from.bucket == kBuckets) return kNotSplit;
  mark_divided(p, shared, num_tiles, own, totals.longest, from);
  return p.split_blocks ? p.split_blocks : fastest_split(p, shared, num_tiles, own);
}

// ---- Steps 4 and 5: work items ------------------------------------------------------------------------------------

// The work items of a warp's 32 tiles by bucket. A tile has `splits` of them.
struct ItemsOfWarp {
  int count = 0;   // of bucket `lane`
  int before = 0;  // of tiles of lower lanes in this tile's bucket

  ItemsOfWarp() = default;
  DEVICE ItemsOfWarp(int bucket, int splits) {
    const int lane = lane_of_thread();
    if (!__any_sync(~0u, splits > 1)) {
      count = __popc(lanes_of_bucket(bucket, lane));
      before = __popc(lanes_of_bucket(bucket, bucket) & ((1u << lane) - 1));
      return;
    }
    for (uint32 left = __ballot_sync(~0u, splits > 0); left; left &= left - 1) {
      const int i = __ffs(left) - 1;
      const int of_tile = __shfl_sync(~0u, bucket, i), of_splits = __shfl_sync(~0u, splits, i);
      const int up_to = __shfl_sync(~0u, count, of_tile);
      if (lane == i) before = up_to;
      if (lane == of_tile) count += of_splits;
    }
  }
};

// The begin of split `split` of a tile of `blocks` KV blocks in `splits`, in KV blocks: blocks * split / splits.
DEVICE int split_point(const Problem& p, int blocks, int split, int splits) {
  if (p.split_blocks) return split * p.split_blocks;
  const int whole = blocks / splits, rest = blocks - whole * splits;
  return whole * split + rest * split / splits;
}

// Writes the items of a warp's tiles, 32 at a time. `item` and `slot` are those of a tile's first split.
DEVICE void store_items(const Problem& p, const Outputs& out, const Tile& t, int first_row, int page_start, int splits,
                        int item, int slot) {
  const int up_to = inclusive_sum(splits), items = __shfl_sync(~0u, up_to, 31);
  for (int first = 0; first < items; first += 32) {
    const int k = first + lane_of_thread();
    int owner = 0;  // the first lane with up_to > k
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      if (__shfl_sync(~0u, up_to, owner + step - 1) <= k) owner += step;
    owner = min(owner, 31);
    const auto of_owner = [&](int x) { return __shfl_sync(~0u, x, owner); };
    const int of_splits = of_owner(splits), split = k - (of_owner(up_to) - of_splits), at = of_owner(item) + split;
    const int begin = of_owner(t.begin), end = of_owner(t.end), first_block = of_owner(t.first_block());
    const int blocks = of_owner(t.blocks()), first_slot = of_owner(slot);
    const int row = of_owner(first_row), rows = of_owner(t.rows), position = of_owner(t.position);
    const int page = of_owner(page_start), request = of_owner(t.request);
    if (k >= items || at >= p.max_items) continue;
    const auto point = [&](int i) { return (first_block + split_point(p, blocks, i, of_splits)) * kBlock; };
    int* record = out.work + int64(at) * kWorkStride;  // a plan may lie at any multiple of 4 bytes
    record[kRow] = row, record[kRows] = rows;
    record[kKvBegin] = split > 0 ? point(split) : begin;
    record[kKvEnd] = split + 1 < of_splits ? point(split + 1) : end;
    record[kPosition] = position, record[kPageStart] = page;
    record[kSlot] = of_splits > 1 ? first_slot + split : -1, record[kRequest] = request;
  }
}

DEVICE void zero(int* to, int64 begin, int64 end) {
  for (int64 i = begin + int(threadIdx.x); i < end; i += kThreads) to[i] = 0;
}

// Writes the work items in the order of buckets, and the split tiles.
DEVICE void write_items(const Problem& p, const Inputs& in, const Outputs& out, Shared& shared, int num_tiles,
                        const Tile& own, int split_blocks) {
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const bool has_splits = split_blocks != kNotSplit;
  const auto division_of = [&](int first, const Tile& t) {
    return Division(p, t, has_splits && shared.divided[first / 32 + warp] >> lane & 1, split_blocks);
  };
  int longest = 0;
  for_each_chunk(p, shared, num_tiles, own,
                 [&](int first, const Tile& t) { longest = max(longest, division_of(first, t).length); });
  longest = max_of_cta(longest, shared.longest);
  const auto bucket = [&](const Tile& t, const Division& of) { return bucket_of(t.used, of.length, longest); };

  int count = 0;
  ItemsOfWarp items;
  for_each_chunk(p, shared, num_tiles, own, [&](int first, const Tile& t) {
    const Division of = division_of(first, t);
    items = ItemsOfWarp(bucket(t, of), of.splits);
    count += items.count;
  });
  shared.counts[1][warp][lane] = count;
  __syncthreads();
  count = 0;
  for (int w = 0; w < kWarps; ++w) count += shared.counts[1][w][lane];
  const int up_to = inclusive_sum(count), num_items = __shfl_sync(~0u, up_to, 31);
  int next_item = up_to - count;  // of bucket `lane`, in the chunks that follow
  int num_slots = 0, num_split_tiles = 0, parity = 0;
  for_each_chunk(p, shared, num_tiles, own, [&](int first, const Tile& t) {
    const Division of = division_of(first, t);
    const int own_bucket = bucket(t, of);
    if (!ONE_CHUNK) items = ItemsOfWarp(own_bucket, of.splits);
    const bool is_split = of.splits > 1;
    const uint32 split_lanes = __ballot_sync(~0u, is_split);
    const int slots_up_to = inclusive_sum(is_split ? of.splits : 0);
    shared.counts[parity][warp][lane] = items.count;
    if (lane == 31)
      shared.of_warp[parity][warp] = slots_up_to, shared.splits_of_warp[parity][warp] = __popc(split_lanes);
    __syncthreads();
    int before = 0, of_chunk = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before = of_chunk;
      of_chunk += shared.counts[parity][w][lane];
    }
    const int item = __shfl_sync(~0u, next_item + before, own_bucket % kBuckets) + items.before;
    next_item += of_chunk;
    int slot = -1, slots_of_chunk, split_tiles_of_chunk;
    const int slots_before = sum_before(shared.of_warp[parity], slots_of_chunk);
    const int split_tiles_before = sum_before(shared.splits_of_warp[parity], split_tiles_of_chunk);
    const int first_row = t.used ? p.row_at(in.qo_indptr, t.request) + t.offset : 0;
    const int page_start = t.used ? in.kv_indptr[min(t.request, p.batch)] : 0;
    if (is_split) {
      slot = num_slots + slots_before + slots_up_to - of.splits;
      const int index = num_split_tiles + split_tiles_before + __popc(split_lanes & ((1u << lane) - 1));
      if (index < p.max_split_tiles) {
        int* record = out.split_tiles + int64(index) * kSplitTileStride;
        record[kTileRow] = first_row, record[kTileRows] = t.rows, record[kTileSlot] = slot;
        record[kTileSlots] = of.splits;
      }
    }
    store_items(p, out, t, first_row, page_start, of.splits, item, slot);
    num_slots += slots_of_chunk, num_split_tiles += split_tiles_of_chunk, parity ^= 1;
  });
  zero(out.work, int64(num_items) * kWorkStride, int64(p.max_items) * kWorkStride);
  zero(out.split_tiles, int64(num_split_tiles) * kSplitTileStride, int64(p.max_split_tiles) * kSplitTileStride);
  if (threadIdx.x == 0) out.queue[kNextUnit] = 0, out.queue[kPlannedItems] = min(num_items, p.max_items);
}

// Publishes the stores of the CTA: kernels that follow may read the plan before they wait for this one (acquire_plan).
DEVICE void publish() {
  __syncthreads();
  if (threadIdx.x == 0) fence_gpu();
}

}  // namespace

// Grid: one CTA, and one for each kPagesOfCta page numbers.
// Owns: CTA 0 all fields of the plan but kv_indices; CTA i > 0 page numbers (i - 1) * kPagesOfCta on.
// Loop invariant: in step 5 next_item is the next work item of each bucket; num_slots and num_split_tiles count those
//     of the tiles before these.
// Barriers: __syncthreads between the steps, and in each chunk of a scan. Later kernels do not start before this one
//     ends, since they may read the plan before they wait.
// Bound by: latency, of the loads of lengths, the scans and reductions of one CTA, and the stores of items.
extern "C" __global__ void __launch_bounds__(kThreads, 1) plan_prefill_kernel(
    const int* qo_indptr,      // [batch + 1]
    const int* kv_indptr,      // [batch + 1]
    const int* kv_indices,     // [num_indices]
    const int* last_page_len,  // [batch]
    const int* seq_lens,       // [batch], or null with one rank
    int* plan_qo_indptr,       // [max_batch + 1]; these and those below are written
    int* plan_kv_indptr,       // [max_batch + 1]
    int* plan_kv_indices,      // [max_pages]
    int* plan_kv_len,          // [max_batch]
    int* work,                 // [max_items, kWorkStride]
    int* split_tiles,          // [max_split_tiles, kSplitTileStride]
    int* queue,                // [kQueueSize]
    int batch, int num_indices, int max_batch, int max_pages, int max_items, int max_split_tiles, int wave,
    int page_size, int tile_rows, int window, int ahead, int ctas, int cluster_splits, int split_blocks, int rank,
    int world, int interleave) {
  wait_for_earlier_kernels();
  if (blockIdx.x > 0) {
    const int first = (int(blockIdx.x) - 1) * kPagesOfCta, end = min(num_indices, first + kPagesOfCta);
    for (int i = first + int(threadIdx.x); i < end; i += kThreads) plan_kv_indices[i] = kv_indices[i];
    return publish();
  }
  __shared__ Shared shared;
  const Problem p = {
      .batch = batch, .max_batch = max_batch, .max_pages = max_pages, .max_items = max_items,
      .max_split_tiles = max_split_tiles, .wave = wave, .page_size = page_size, .tile_rows = tile_rows,
      .window = window, .ahead = ahead, .ctas = ctas, .cluster_splits = cluster_splits, .split_blocks = split_blocks,
      .rank = rank, .world = world, .interleave = interleave, .seq_lens = seq_lens,
  };
  const Inputs in = {qo_indptr, kv_indptr, last_page_len};
  const Outputs out = {plan_qo_indptr, plan_kv_indptr, plan_kv_len, work, split_tiles, queue};
  const int num_tiles = read_requests(p, in, out, shared);
  const Tile own = locate(p, shared, threadIdx.x, num_tiles);
  const int split_blocks_of_longest = max_split_tiles > 0 ? choose_splits(p, shared, num_tiles, own) : kNotSplit;
  write_items(p, in, out, shared, num_tiles, own, split_blocks_of_longest);
  publish();
}

}  // namespace attn_ops
