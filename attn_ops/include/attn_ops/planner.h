// Planner: the plan and the workspace of a package, filled for each batch by the package's planning graph.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "metadata.h"
#include "page_table.h"

namespace attn {

using Loader = torch::inductor::AOTIModelPackageLoader;

namespace detail {

inline std::string text(c10::IntArrayRef sizes) {
  std::string found = "[";
  for (size_t d = 0; d < sizes.size(); ++d)
    found += (d ? ", " : "") + (sizes[d] == kDynamic ? std::string("?") : std::to_string(sizes[d]));
  return found + "]";
}

inline std::string text(int64_t number) { return std::to_string(number); }

inline std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

// The message of a C++ exception without the backtrace.
inline std::string message(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

inline std::unique_ptr<Loader> load(const std::string& path, const char* model, c10::Device device, size_t runners) {
  try {
    return std::make_unique<Loader>(path, model, false, runners, device.index());
  } catch (const std::exception& error) {
    fail<PackageError>(
        "package", "cannot load " + path + ": " + message(error),
        "a package that attn_ops.export_package wrote for this version of PyTorch", "correct the path, or export it again");
  }
}

inline std::vector<at::Tensor> run(Loader& loader, std::vector<at::Tensor> inputs) {
  const c10::InferenceMode inference_mode;
  try {
    return loader.run(inputs);
  } catch (const std::exception& error) {
    const std::string what = message(error);
    if (what.find("the plan capacity for") != std::string::npos) throw CapacityError(what);
    throw Error(what);
  }
}

inline void check_device(const char* where, const Metadata& metadata, c10::Device device) {
  const std::string name = c10::DeviceTypeName(device.type(), true);
  if (name != metadata.device)
    fail<DeviceError>(
        where, "the device is " + name, metadata.device + ", which the package was compiled for",
        "use that device, or export the package on the other");
}

// The contents of an integer tensor on the host.
inline std::vector<int64_t> contents(const char* name, const at::Tensor& t) {
  const std::string what(name);
  if (!t.defined()) fail<ArgumentError>("plan", what + " is undefined", "a tensor", "pass a tensor");
  if (!at::isIntegralType(t.scalar_type(), false))
    fail<DTypeError>("plan", what + " is " + dtype_name(t.scalar_type()), "an integer dtype", "convert it");
  if (!t.device().is_cpu())
    fail<DeviceError>("plan", what + " is on " + t.device().str(), "the host", "plan from tensors on the host");
  if (t.dim() != 1) fail<ShapeError>("plan", what + " is " + text(t.sizes()), "one dimension", "flatten it");
  const at::Tensor values = t.to(at::kLong).contiguous();
  return {values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel()};
}

inline void check_indptr(const std::string& name, const std::vector<int64_t>& values) {
  if (values.empty()) fail<ShapeError>("plan", name + " is [0]", "[batch + 1]", "pass cumulative lengths");
  if (values[0] != 0)
    fail<PageTableError>("plan", name + " starts at " + text(values[0]), "0", "pass cumulative lengths from 0");
  for (size_t b = 0; b + 1 < values.size(); ++b)
    if (values[b + 1] < values[b])
      fail<PageTableError>(
          "plan", name + " falls from " + text(values[b]) + " to " + text(values[b + 1]) + " at request " + text(static_cast<int64_t>(b)),
          "values that never decrease", "pass cumulative lengths");
}

inline void check_capacity(
    const std::string& where, int64_t needed, int64_t capacity, const std::string& batch, const std::string& of_what,
    const std::string& name) {
  if (needed > capacity)
    fail<CapacityError>(
        where, batch + " " + text(needed) + " " + of_what + " and the plan capacity for " + text(capacity),
        name + " of at least " + text(needed), "make the planner with that " + name);
}

inline at::Tensor int32(const std::vector<int64_t>& values, int64_t size) {
  at::Tensor t = at::zeros({size}, at::kInt);
  std::transform(values.begin(), values.end(), t.data_ptr<int32_t>(), [](int64_t v) { return static_cast<int32_t>(v); });
  return t;
}

}  // namespace detail

// Owns a plan and its workspace. A plan() that throws leaves both as they were. One thread at a time may call plan().
// On CUDA, work is on the current stream.
class Planner {
 public:
  explicit Planner(const std::string& path, c10::Device device = at::kCPU)
      : loader_(detail::load(path, "plan", device, 1)), metadata_(path, loader_->get_metadata()), device_(device) {
    detail::check_device("Planner", metadata_, device);
    const auto options = at::TensorOptions().device(device);
    for (const auto& [name, sizes] : metadata_.fields) {
      // Only `problem` has no elements and large sizes: contiguous strides would overflow.
      const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
      state_.push_back(
          empty ? at::empty_strided(sizes, Sizes(sizes.size(), 0), options.dtype(at::kInt))
                : at::zeros(sizes, options.dtype(at::kInt)));
    }
    workspace_ = at::zeros({metadata_.workspace}, options.dtype(at::kFloat));
  }

  // Fill the plan of batch_decode or batch_mla for one query row of each request.
  void plan(const Batch& batch) { fill(nullptr, batch); }

  // Fill the plan of batch_prefill, or of batch_mla: request b has the query rows qo_indptr[b] to qo_indptr[b + 1].
  void plan(const at::Tensor& qo_indptr, const Batch& batch) { fill(&qo_indptr, batch); }

  // Fill the plan of ragged_prefill: request b has the KV tokens kv_indptr[b] to kv_indptr[b + 1].
  void plan_ragged(const at::Tensor& qo_indptr, const at::Tensor& kv_indptr) {
    if (metadata_.of_capacity("max_pages") != 0)
      fail<ArgumentError>(
          "plan", "kv_indices and kv_last_page_len are missing", "both, since the planner was made for paged KV",
          "pass the two, or make the planner with max_pages=0");
    const auto requests = std::max<int64_t>(kv_indptr.defined() ? kv_indptr.numel() - 1 : 0, 0);
    fill(&qo_indptr, {kv_indptr, at::zeros({0}, at::kInt), at::ones({requests}, at::kInt)});
  }

  const std::vector<at::Tensor>& state() const { return state_; }
  const at::Tensor& workspace() const { return workspace_; }
  const Metadata& metadata() const { return metadata_; }
  c10::Device device() const { return device_; }

  int64_t page_size() const { return metadata_.of_problem("page_size"); }
  int64_t max_batch() const { return metadata_.of_capacity("max_batch"); }
  int64_t max_pages() const { return metadata_.of_capacity("max_pages"); }

 private:
  void fill(const at::Tensor* rows, const Batch& batch) {
    const bool prefill = metadata_.plan == "PrefillPlan";
    if (prefill != (rows != nullptr))
      fail<ArgumentError>(
          "plan", prefill ? "qo_indptr is missing" : "qo_indptr is given",
          prefill ? "qo_indptr, since this is a prefill plan" : "none, since this is a decode plan",
          prefill ? "pass it before the page table" : "leave it out");
    const std::vector<int64_t> qo_indptr = rows ? detail::contents("qo_indptr", *rows) : std::vector<int64_t>{};
    const std::vector<int64_t> kv_indptr = detail::contents("kv_indptr", batch.kv_indptr);
    const std::vector<int64_t> kv_indices = detail::contents("kv_indices", batch.kv_indices);
    const std::vector<int64_t> last = detail::contents("kv_last_page_len", batch.kv_last_page_len);
    if (rows) {
      detail::check_indptr("qo_indptr", qo_indptr);
      detail::check_capacity(
          "plan", qo_indptr.back(), metadata_.of_capacity("max_tokens"), "the batch has", "query rows", "max_tokens");
    }
    detail::check_indptr("kv_indptr", kv_indptr);
    const std::vector<int64_t> lengths = check_pages(kv_indptr, kv_indices, last);
    const std::string op = prefill ? "plan_prefill" : "plan_decode";
    const auto requests = static_cast<int64_t>(last.size());
    detail::check_capacity(op, requests, max_batch(), "the batch has", "requests", "max_batch");
    detail::check_capacity(
        op, static_cast<int64_t>(kv_indices.size()), max_pages(), "the batch has", "pages", "max_pages");
    if (rows && qo_indptr.size() != kv_indptr.size())
      fail<ShapeError>(
          op, "qo_indptr has length " + detail::text(static_cast<int64_t>(qo_indptr.size())),
          detail::text(requests + 1) + " as in kv_indptr", "make the two agree");
    if (rows && metadata_.of_problem("split") > 0) check_splits(qo_indptr, lengths);

    std::vector<at::Tensor> inputs;
    if (rows) inputs.push_back(detail::int32(qo_indptr, requests + 1));
    inputs.push_back(detail::int32(kv_indptr, requests + 1));
    inputs.push_back(detail::int32(kv_indices, max_pages()));
    inputs.push_back(detail::int32(last, requests));
    for (at::Tensor& t : inputs) t = t.to(device_);
    inputs.insert(inputs.end(), state_.begin(), state_.end());
    detail::run(*loader_, inputs);
  }

  // The KV tokens of each request. Raises what attn_ops/plan/page_table_checks.py raises.
  std::vector<int64_t> check_pages(
      const std::vector<int64_t>& indptr, const std::vector<int64_t>& indices, const std::vector<int64_t>& last) const {
    const size_t requests = indptr.size() - 1;
    if (last.size() != requests)
      fail<ShapeError>(
          "plan", "kv_last_page_len is [" + std::to_string(last.size()) + "]",
          "[" + std::to_string(requests) + "], one per request as in kv_indptr", "make the two agree");
    for (size_t b = 0; b < requests; ++b)
      if (indptr[b + 1] > indptr[b] && (last[b] < 1 || last[b] > page_size()))
        fail<PageTableError>(
            "plan", "kv_last_page_len[" + std::to_string(b) + "] is " + detail::text(last[b]),
            "1 to page_size " + detail::text(page_size()),
            "a request whose last page is full has page_size there, an empty one has no page");
    const int64_t used = indptr.back();
    if (max_pages() > 0) {
      if (used > static_cast<int64_t>(indices.size()))
        fail<PageTableError>(
            "plan", "kv_indptr ends at " + detail::text(used) + " and kv_indices has " + std::to_string(indices.size()) + " entries",
            "an entry for every page", "pass all page numbers");
      detail::check_capacity("plan", used, max_pages(), "the batch has", "pages", "max_pages");
    }
    std::vector<int64_t> lengths(requests, 0);
    const int64_t longest = metadata_.of_problem("max_kv_len");
    for (size_t b = 0; b < requests; ++b) {
      const int64_t pages = indptr[b + 1] - indptr[b];
      if (pages > 0) lengths[b] = (pages - 1) * page_size() + last[b];
    }
    const int64_t most = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    detail::check_capacity("plan", most, longest, "a request has", "tokens", "max_kv_len");
    if (max_pages() > 0) {
      const int64_t pages = metadata_.of_capacity("cache_pages");
      const int64_t bound = pages ? pages : std::numeric_limits<int32_t>::max();
      for (int64_t i = 0; i < used; ++i) {
        const int64_t page = indices[static_cast<size_t>(i)];
        if (page < 0 || page >= bound)
          fail<PageTableError>(
              "plan", "kv_indices[" + detail::text(i) + "] is " + detail::text(page),
              "a page of the cache, 0 to " + detail::text(bound - 1), "pass page numbers of this cache");
      }
    }
    return lengths;
  }

  // Splits of a fixed size fit the plan, as count_splits of attn_ops/plan/sizing.py counts them.
  void check_splits(const std::vector<int64_t>& qo_indptr, const std::vector<int64_t>& lengths) const {
    const int64_t tile_rows = metadata_.of_problem("tile_rows"), window = metadata_.of_problem("window");
    const int64_t split = metadata_.of_problem("split"), block = metadata_.kv_block;
    const auto blocks_to = [block](int64_t tokens) { return (tokens + block - 1) / block; };
    int64_t needed = 0;
    for (size_t b = 0; b < lengths.size(); ++b) {
      const int64_t rows = qo_indptr[b + 1] - qo_indptr[b];
      for (int64_t offset = 0; offset < rows; offset += tile_rows) {
        const int64_t position = lengths[b] - rows + offset;
        const int64_t end_row = std::max<int64_t>(position + std::min(tile_rows, rows - offset), 0);
        const int64_t end = metadata_.of_problem("causal") ? std::min(lengths[b], end_row) : lengths[b];
        const int64_t begin = window ? std::min(std::max<int64_t>(position + 1 - window, 0), end) : 0;
        const int64_t blocks = end > begin ? blocks_to(end) - begin / block : 0;
        const int64_t splits = (blocks + split / block - 1) / (split / block);
        if (splits > 1) needed += splits;
      }
    }
    needed += needed % 2;
    const int64_t capacity = metadata_.of_capacity("max_splits");
    if (needed > capacity)
      fail<CapacityError>(
          "plan", "the batch makes " + detail::text(needed) + " splits of " + detail::text(split) +
              " tokens and the plan capacity for " + detail::text(capacity),
          "num_ctas of at least " + detail::text(needed),
          "make the planner with that num_ctas, or with a larger fixed_split_size");
  }

  std::unique_ptr<Loader> loader_;
  Metadata metadata_;
  c10::Device device_;
  std::vector<at::Tensor> state_;
  at::Tensor workspace_;
};

}  // namespace attn
