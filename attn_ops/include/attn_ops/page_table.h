// Page tables of requests that grow and end, on the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"

namespace attn {

// The page table of one batch: int32 tensors on the host, as attn::plan_decode and attn::plan_prefill take them.
struct Batch {
  at::Tensor kv_indptr;         // [requests + 1]
  at::Tensor kv_indices;        // [pages]
  at::Tensor kv_last_page_len;  // [requests]
};

// Allocates the pages of a cache to requests. A call that throws leaves it as it was.
class PageTable {
 public:
  using Request = int64_t;

  PageTable(int64_t cache_pages, int64_t page_size) : page_size_(page_size) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    for (const auto& [name, size] : {std::pair{"cache_pages", cache_pages}, std::pair{"page_size", page_size}}) {
      const std::string what = std::string(name) + " is " + std::to_string(size);
      if (size < 1) fail<OptionError>("PageTable", what, "at least 1", "make it larger");
      if (size > most) fail<OptionError>("PageTable", what, "at most " + std::to_string(most), "make it smaller");
    }
    free_.resize(static_cast<size_t>(cache_pages));
    for (size_t i = 0; i < free_.size(); ++i) free_[i] = static_cast<int32_t>(free_.size() - 1 - i);
  }

  // A new request without tokens. Its number is not used again.
  Request add() {
    requests_.emplace(next_, Entry{});
    return next_++;
  }

  // The number of pages that append() would allocate.
  int64_t needed(Request request, int64_t tokens = 1) const {
    return needed("needed", find("needed", request), tokens);
  }

  // Grow a request by `tokens`, with new pages where they are needed.
  void append(Request request, int64_t tokens = 1) {
    Entry& entry = find("append", request);
    const int64_t more = needed("append", entry, tokens);
    if (more > free_pages())
      fail<CapacityError>(
          "append",
          "request " + std::to_string(request) + " needs " + std::to_string(more) + " more pages and the cache has " +
              std::to_string(free_pages()) + " free",
          "a free page for every " + std::to_string(page_size_) + " tokens",
          "release a request, or make the cache larger");
    entry.pages.insert(entry.pages.end(), free_.rbegin(), free_.rbegin() + more);  // nothing throws from here on
    free_.resize(free_.size() - static_cast<size_t>(more));
    entry.length += tokens;
  }

  // End a request. Its pages are free again; their contents stay.
  void release(Request request) {
    const Entry& entry = find("release", request);
    free_.insert(free_.end(), entry.pages.rbegin(), entry.pages.rend());
    requests_.erase(request);
  }

  // The page table of these requests, in this order.
  Batch batch(const std::vector<Request>& requests) const {
    int64_t used = 0;
    for (const Request request : requests) used += static_cast<int64_t>(find("batch", request).pages.size());
    const auto count = static_cast<int64_t>(requests.size());
    Batch batch{at::zeros({count + 1}, at::kInt), at::zeros({used}, at::kInt), at::zeros({count}, at::kInt)};
    auto* indptr = batch.kv_indptr.data_ptr<int32_t>();
    auto* indices = batch.kv_indices.data_ptr<int32_t>();
    auto* last = batch.kv_last_page_len.data_ptr<int32_t>();
    for (int64_t b = 0; b < count; ++b) {
      const Entry& entry = find("batch", requests[static_cast<size_t>(b)]);
      const auto pages = static_cast<int64_t>(entry.pages.size());
      std::copy(entry.pages.begin(), entry.pages.end(), indices + indptr[b]);
      indptr[b + 1] = static_cast<int32_t>(indptr[b] + pages);
      last[b] = pages ? static_cast<int32_t>(entry.length - (pages - 1) * page_size_) : 0;
    }
    return batch;
  }

  int64_t length(Request request) const { return find("length", request).length; }
  const std::vector<int32_t>& pages(Request request) const { return find("pages", request).pages; }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t page_size() const { return page_size_; }

 private:
  struct Entry {
    int64_t length = 0;
    std::vector<int32_t> pages;
  };

  int64_t needed(const char* where, const Entry& entry, int64_t tokens) const {
    if (tokens < 0)
      fail<OptionError>(where, "tokens is " + std::to_string(tokens), "0 or more", "release the request to shrink it");
    // In pages, so that no number of tokens overflows.
    const int64_t unused = static_cast<int64_t>(entry.pages.size()) * page_size_ - entry.length;
    return tokens <= unused ? 0 : (tokens - unused - 1) / page_size_ + 1;
  }

  const Entry& find(const char* where, Request request) const {
    const auto found = requests_.find(request);
    if (found == requests_.end())
      fail<ArgumentError>(
          where, "there is no request " + std::to_string(request), "a request that add() returned",
          "do not use a request after its release()");
    return found->second;
  }
  Entry& find(const char* where, Request request) {
    return const_cast<Entry&>(std::as_const(*this).find(where, request));
  }

  int64_t page_size_;
  Request next_ = 0;
  std::map<Request, Entry> requests_;
  std::vector<int32_t> free_;  // the last is allocated next
};

}  // namespace attn
