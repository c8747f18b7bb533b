// Planner: the plan and the workspace of a package, filled for each batch by the package's planning graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
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
inline at::ScalarType dtype_of(const std::string& name) { return c10::getStringToDtypeMap().at(name); }

inline std::string layout_name(at::Layout layout) {
  switch (layout) {
    case at::kSparse: return "sparse_coo";
    case at::kSparseCsr: return "sparse_csr";
    case at::kSparseCsc: return "sparse_csc";
    case at::kSparseBsr: return "sparse_bsr";
    case at::kSparseBsc: return "sparse_bsc";
    default: return "not strided";
  }
}

// The message of a C++ exception without the backtrace. A package throws errors of torch as other exceptions.
inline std::string message(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string what = of_torch ? of_torch->what_without_backtrace() : error.what();
  return what.substr(0, what.find("\nException raised from "));
}

[[noreturn]] inline void cannot_load(const std::string& path, const std::exception& error) {
  const std::string what = message(error);
  fail<PackageError>(
      "package", "cannot load " + path + ": " + what.substr(0, what.find('\n')),  // a list of all files follows
      "a package that attn_ops.export_package wrote for this version of PyTorch",
      "correct the path, or export it again");
}

// Raise for code with instructions that this CPU does not have, which would end the process.
inline void check_cpu(const std::string& path, const std::string& isa) {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool runs = isa.find("AVX512") != std::string::npos ? avx512 : isa.find("AVX2") == std::string::npos || avx2;
  if (!runs)
    fail<PackageError>(
        "package", path + " is compiled for a CPU with " + isa,
        avx2 ? "AVX2, as this CPU has" : "no vector instructions",
        std::string("export it on a CPU like this one, or with inductor_configs={'cpp.simdlen': ") +
            (avx2 ? "256}" : "1}"));
#else
  (void)path, (void)isa;
#endif
}

// Held while a package is read: PyTorch's loader parses the metadata into one object for all threads.
inline std::mutex loader_mutex;

// What a package says of `model`, read and checked before anything of it is loaded.
inline Metadata metadata_of(const std::string& path, const char* model) {
  std::unordered_map<std::string, std::string> entries;
  try {
    const std::lock_guard<std::mutex> lock(loader_mutex);
    entries = Loader::load_metadata_from_package(path, model);
  } catch (const std::exception& error) {
    cannot_load(path, error);
  }
  Metadata metadata(path, std::move(entries));
  check_cpu(path, metadata.cpu);
  return metadata;
}

// One runner is single-threaded: otherwise the loader waits on the host for a runner whose work on the GPU has ended.
inline std::unique_ptr<Loader> load(const std::string& path, const char* model, c10::Device device, size_t runners) {
  if (runners == 0) fail<OptionError>("Package", "num_runners is 0", "at least 1", "make it larger");
  try {
    const std::lock_guard<std::mutex> lock(loader_mutex);
    return std::make_unique<Loader>(path, model, runners == 1, runners, device.index());
  } catch (const std::exception& error) {
    cannot_load(path, error);
  }
}

// A size guard of a package counts the inputs. Raise its message by the name of the tensor; return for other messages.
template <class Name>
void refuse_size(const std::string& where, const std::string& what, size_t inputs, const Name& name) {
  const std::string begin = "package: ", counted = " of input ";
  const size_t at = what.find(counted);
  if (what.rfind(begin, 0) != 0 || at == std::string::npos) return;
  char* rest = nullptr;
  const size_t i = std::strtoul(what.c_str() + at + counted.size(), &rest, 10);
  if (i >= inputs) return;
  throw ShapeError(where + ": " + what.substr(begin.size(), at - begin.size()) + " of " + name(i) + rest);
}

// `name(i)` is that of an input. Dtypes and device types have been checked.
template <class Name>
std::vector<at::Tensor> run(
    const std::string& where, Loader& loader, c10::Device device, const std::vector<at::Tensor>& inputs,
    const Name& name) {
  const c10::InferenceMode inference_mode;
  const c10::DeviceGuard on_device(device);
  try {
    return loader.run(inputs);
  } catch (const std::exception& error) {
    const std::string what = message(error);
    if (what.find("the plan capacity for") != std::string::npos) throw CapacityError(what);
    refuse_size(where, what, inputs.size(), name);
    throw Error(what);
  }
}

// The device of a package: `given`, or the current one of the type that the package was compiled for.
inline c10::Device device_of(const char* where, const Metadata& metadata, std::optional<c10::Device> given) {
  const c10::Device device = given.value_or(c10::Device(metadata.device));
  const std::string name = c10::DeviceTypeName(device.type(), true);
  if (name != metadata.device)
    fail<DeviceError>(
        where, "the device is " + name, metadata.device + ", which the package was compiled for",
        "use that device, or export the package on the other");
  if (device.is_cpu()) return c10::Device(at::kCPU);  // the loader takes no index
  if (device.has_index()) return device;
  try {
    return c10::impl::VirtualGuardImpl(device.type()).getDevice();
  } catch (const std::exception& error) {
    fail<DeviceError>(
        where, "there is no device of type " + name + ": " + message(error), "one, which the package was compiled for",
        "run it on a machine with a GPU and with a PyTorch for it, or export it on the CPU");
  }
}

// The tokens of every request that this rank holds, as ContextShard of attn_ops/plan/context.py assigns them.
struct Shard {
  int64_t rank, world, interleave;

  bool owns(int64_t position) const { return world == 1 || position / interleave % world == rank; }
  int64_t tokens_before(int64_t position) const {
    if (position <= 0 || world == 1) return std::max<int64_t>(position, 0);
    const int64_t turn = interleave * world;
    return position / turn * interleave + std::clamp<int64_t>(position % turn - rank * interleave, 0, interleave);
  }
};

// A tensor that planning reads.
struct Table {
  std::string name;
  at::Tensor tensor;
};

// Raises what attn_ops/typed.py raises of a tensor without strides.
inline void check_strided(const char* where, const std::string& name, const at::Tensor& t) {
  if (!t.defined()) fail<ArgumentError>(where, name + " is undefined", "a tensor", "pass a tensor");
  if (t.is_nested())
    fail<ArgumentError>(
        where, name + " is a nested tensor", "a strided tensor",
        "pass torch.cat(" + name + ".unbind()), or " + name + ".to_padded_tensor(0)");
  if (t.layout() != at::kStrided)
    fail<ArgumentError>(
        where, name + " is " + layout_name(t.layout()), "a strided tensor", "pass " + name + ".to_dense()");
}

inline void check_table(const Table& table, c10::Device device) {
  const auto& [name, t] = table;
  check_strided("plan", name, t);
  if (!at::isIntegralType(t.scalar_type(), false))
    fail<DTypeError>("plan", name + " is " + dtype_name(t.scalar_type()), "an integer dtype", "convert it");
  if (t.device() != device)
    fail<DeviceError>(
        "plan", name + " is on " + t.device().str(),
        device.is_cpu() ? "the host" : device.str() + ", where the rest of the page table is", "move it there");
}

// The contents of an integer tensor on the host.
inline std::vector<int64_t> contents(const at::Tensor& t) {
  const at::Tensor values = t.to(at::kLong).contiguous();
  return {values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel()};
}

inline void check_indptr(const std::string& name, const std::vector<int64_t>& values) {
  if (values[0] != 0)
    fail<PageTableError>("plan", name + " starts at " + text(values[0]), "0", "pass cumulative lengths from 0");
  for (size_t b = 0; b + 1 < values.size(); ++b)
    if (values[b + 1] < values[b])
      fail<PageTableError>(
          "plan",
          name + " falls from " + text(values[b]) + " to " + text(values[b + 1]) + " at request " + std::to_string(b),
          "values that never decrease", "pass cumulative lengths");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // plans have int32
  if (values.back() > kMost)
    fail<PageTableError>(
        "plan", name + " ends at " + text(values.back()), "at most " + text(kMost), "split the batch");
}

inline void check_capacity(
    const std::string& where, int64_t needed, int64_t capacity, const std::string& batch, const std::string& of_what,
    const std::string& name) {
  if (needed > capacity)
    fail<CapacityError>(
        where, batch + " " + text(needed) + " " + of_what + " and the plan capacity for " + text(capacity),
        name + " of at least " + text(needed), "make the planner with that " + name);
}

// Copies of these vectors on the device, int32. To a GPU it is one copy from pinned memory, on the current stream, for
// which the host does not wait.
inline std::vector<at::Tensor> upload(const std::vector<std::vector<int64_t>>& vectors, c10::Device device) {
  constexpr size_t kAligned = 64;  // elements, since kernels read vectors from 16 bytes on
  std::vector<int64_t> begins{0};
  for (const auto& values : vectors)
    begins.push_back(begins.back() + static_cast<int64_t>((values.size() + kAligned - 1) / kAligned * kAligned));
  const at::Tensor staged = at::empty({begins.back()}, at::TensorOptions(at::kInt).pinned_memory(!device.is_cpu()));
  auto* out = staged.data_ptr<int32_t>();
  for (size_t i = 0; i < vectors.size(); ++i)
    std::transform(
        vectors[i].begin(), vectors[i].end(), out + begins[i], [](int64_t v) { return static_cast<int32_t>(v); });
  const at::Tensor copied = staged.to(device, /*non_blocking=*/true);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < vectors.size(); ++i)
    tensors.push_back(copied.narrow(0, begins[i], static_cast<int64_t>(vectors[i].size())));
  return tensors;
}

}  // namespace detail

// Owns a plan and its workspace. A plan() that throws leaves both as they were. One thread at a time may call plan().
//
// A page table on the host, such as that of a PageTable, is checked, and to a GPU it is copied from pinned memory. One
// whose tensors are all on the plan's GPU is planned without its contents being read on the host: entries out of range
// are clamped, as in Python. On CUDA, work is on the current stream, and plan() does not wait for it. Only a page table
// on the GPU may be planned in a CUDA graph: a replay would copy another from pinned memory that has been used again.
class Planner {
 public:
  // On the device that the package was compiled for. On CUDA that is the current one, or `device`.
  explicit Planner(const std::string& path, std::optional<c10::Device> device = std::nullopt)
      : metadata_(detail::metadata_of(path, "plan")),
        device_(detail::device_of("Planner", metadata_, device)),
        shard_{metadata_.of_problem("rank"), metadata_.of_problem("world"), metadata_.of_problem("interleave")},
        loader_(detail::load(path, "plan", device_, 1)) {
    const auto options = at::TensorOptions().device(device_);
    for (const auto& [name, sizes] : metadata_.fields) {
      // Only `problem` has no elements and large sizes: contiguous strides would overflow.
      const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
      state_.push_back(
          empty ? at::empty_strided(sizes, Sizes(sizes.size(), 0), options.dtype(at::kInt))
                : at::zeros(sizes, options.dtype(at::kInt)));
    }
    workspace_ = at::zeros({metadata_.workspace}, options.dtype(at::kFloat));
  }

  // Fill the plan of batch_decode: one query row of each request.
  void plan(const Batch& batch) { fill({}, batch); }

  // Fill the plan of batch_prefill or batch_mla: request b has the query rows qo_indptr[b] to qo_indptr[b + 1].
  void plan(const at::Tensor& qo_indptr, const Batch& batch) { fill({{"qo_indptr", qo_indptr}}, batch); }

  // Fill the plan of ragged_prefill: request b has the KV tokens kv_indptr[b] to kv_indptr[b + 1].
  void plan_ragged(const at::Tensor& qo_indptr, const at::Tensor& kv_indptr) {
    if (max_pages() != 0)
      fail<ArgumentError>(
          "plan", "kv_indices and kv_last_page_len are missing", "both, since the planner was made for paged KV",
          "pass the two, or make the planner with max_pages=0");
    const auto requests = std::max<int64_t>(kv_indptr.defined() ? kv_indptr.numel() - 1 : 0, 0);
    const auto options = at::TensorOptions(at::kInt).device(kv_indptr.defined() ? kv_indptr.device() : at::kCPU);
    plan(qo_indptr, {kv_indptr, at::empty({0}, options), at::ones({requests}, options)});
  }

  const std::vector<at::Tensor>& state() const { return state_; }
  const at::Tensor& workspace() const { return workspace_; }
  const Metadata& metadata() const { return metadata_; }
  c10::Device device() const { return device_; }

  int64_t page_size() const { return metadata_.of_problem("page_size"); }
  int64_t max_batch() const { return metadata_.of_capacity("max_batch"); }
  int64_t max_tokens() const { return metadata_.of_capacity("max_tokens"); }  // query rows of a batch
  int64_t max_pages() const { return metadata_.of_capacity("max_pages"); }
  int64_t max_kv_len() const { return metadata_.of_problem("max_kv_len"); }  // KV tokens of a request

 private:
  // `tables` is [qo_indptr] or empty.
  void fill(std::vector<detail::Table> tables, const Batch& batch) {
    const bool prefill = metadata_.plan == "PrefillPlan";
    if (prefill == tables.empty())
      fail<ArgumentError>(
          "plan", prefill ? "qo_indptr is missing" : "qo_indptr is given",
          prefill ? "qo_indptr, since this is a prefill plan" : "none, since this is a decode plan",
          prefill ? "pass it before the page table" : "leave it out");
    tables.push_back({"kv_indptr", batch.kv_indptr});
    tables.push_back({"kv_indices", batch.kv_indices});
    tables.push_back({"kv_last_page_len", batch.kv_last_page_len});
    const bool on_device = std::any_of(tables.begin(), tables.end(), [this](const detail::Table& table) {
      return table.tensor.defined() && table.tensor.device() == device_;
    });
    const c10::Device device = on_device ? device_ : c10::Device(at::kCPU);
    for (const detail::Table& table : tables) detail::check_table(table, device);
    check_shapes(tables);
    std::vector<at::Tensor> inputs = device.is_cpu() ? from_host(tables) : from_device(tables);
    at::Tensor& pages = inputs[tables.size() - 2];
    if (max_pages() == 1 && pages.numel() == 0) pages = at::zeros({1}, pages.options());  // the graph takes one
    inputs.insert(inputs.end(), state_.begin(), state_.end());
    detail::run("plan", *loader_, device_, inputs, [&](size_t i) {
      return i < tables.size() ? tables[i].name : "plan." + metadata_.fields[i - tables.size()].first;
    });
  }

  // A page table on the GPU, of which the host knows the sizes.
  std::vector<at::Tensor> from_device(const std::vector<detail::Table>& tables) const {
    std::vector<at::Tensor> inputs;
    for (const detail::Table& table : tables) inputs.push_back(table.tensor.to(at::kInt).contiguous());
    const size_t kv = inputs.size() - 3;
    check_capacities(kv > 0, inputs[kv].numel() - 1, inputs[kv + 1].numel());
    return inputs;
  }

  // A page table on the host, of which all contents are checked.
  std::vector<at::Tensor> from_host(const std::vector<detail::Table>& tables) const {
    std::vector<std::vector<int64_t>> values;
    for (const detail::Table& table : tables) values.push_back(detail::contents(table.tensor));
    const bool prefill = values.size() == 4;
    const std::vector<int64_t>&indptr = values[values.size() - 3], &last = values.back();
    std::vector<int64_t>& indices = values[values.size() - 2];
    if (prefill) {
      detail::check_indptr("qo_indptr", values[0]);
      detail::check_capacity("plan", values[0].back(), max_tokens(), "the batch has", "query rows", "max_tokens");
    }
    detail::check_indptr("kv_indptr", indptr);
    const std::vector<int64_t> lengths = check_pages(indptr, indices, last);
    if (max_pages() > 0 && static_cast<int64_t>(indices.size()) > max_pages())
      indices.resize(static_cast<size_t>(indptr.back()));  // entries after those of the last request need no capacity
    check_capacities(prefill, static_cast<int64_t>(last.size()), static_cast<int64_t>(indices.size()));
    if (prefill && metadata_.of_problem("split") > 0) check_splits(values[0], lengths);
    return detail::upload(values, device_);
  }

  // Raises what check_table of attn_ops/plan/page_table_checks.py raises.
  static void check_shapes(const std::vector<detail::Table>& tables) {
    const size_t kv = tables.size() - 3;
    const auto refuse = [&tables](size_t i, const std::string& expected, const char* fix) {
      fail<ShapeError>("plan", tables[i].name + " is " + detail::text(tables[i].tensor.sizes()), expected, fix);
    };
    const auto is_vector = [&tables](size_t i) { return tables[i].tensor.dim() == 1; };
    for (size_t i = 0; i <= kv; ++i)
      if (!is_vector(i) || tables[i].tensor.numel() == 0) refuse(i, "[batch + 1]", "pass cumulative lengths");
    if (!is_vector(kv + 1)) refuse(kv + 1, "[pages]", "pass a vector of page numbers");
    const int64_t requests = tables[kv].tensor.numel() - 1;
    for (const size_t i : {size_t{0}, kv + 2}) {
      const int64_t length = i == kv + 2 ? requests : requests + 1;
      if (!is_vector(i) || tables[i].tensor.numel() != length)
        refuse(
            i, "[" + detail::text(length) + "] for the " + detail::text(requests) + " requests of kv_indptr",
            "make the two agree");
    }
  }

  void check_capacities(bool prefill, int64_t requests, int64_t pages) const {
    const std::string op = prefill ? "plan_prefill" : "plan_decode";
    detail::check_capacity(op, requests, max_batch(), "the batch has", "requests", "max_batch");
    detail::check_capacity(op, pages, max_pages(), "the batch has", "pages", "max_pages");
  }

  // The KV tokens of each request. Raises what attn_ops/plan/page_table_checks.py raises.
  std::vector<int64_t> check_pages(
      const std::vector<int64_t>& indptr, const std::vector<int64_t>& indices, const std::vector<int64_t>& last) const {
    const size_t requests = indptr.size() - 1;
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
            "plan",
            "kv_indptr ends at " + detail::text(used) + " and kv_indices has " + std::to_string(indices.size()) +
                " entries",
            "an entry for every page", "pass all page numbers");
      detail::check_capacity("plan", used, max_pages(), "the batch has", "pages", "max_pages");
    }
    std::vector<int64_t> lengths(requests, 0);
    for (size_t b = 0; b < requests; ++b) {
      const int64_t pages = indptr[b + 1] - indptr[b];
      if (pages > 0) lengths[b] = (pages - 1) * page_size() + last[b];
    }
    const int64_t most = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    detail::check_capacity("plan", most, max_kv_len(), "a request has", "tokens", "max_kv_len");
    const int64_t cache_pages = metadata_.of_capacity("cache_pages"), tokens = page_size();
    const int64_t bound = cache_pages ? cache_pages : std::numeric_limits<int32_t>::max();
    for (size_t b = 0; max_pages() > 0 && b < requests; ++b)
      for (int64_t i = indptr[b]; i < indptr[b + 1]; ++i) {
        const int64_t page = indices[static_cast<size_t>(i)];
        if (shard_.owns((i - indptr[b]) * tokens) && (page < 0 || page >= bound))
          fail<PageTableError>(
              "plan", "kv_indices[" + detail::text(i) + "] is " + detail::text(page),
              "a page of the cache, 0 to " + detail::text(bound - 1), "pass page numbers of this cache");
      }
    return lengths;
  }

  // Splits of a fixed size fit the plan, as count_splits of attn_ops/plan/query_tiles.py counts them.
  void check_splits(const std::vector<int64_t>& qo_indptr, const std::vector<int64_t>& lengths) const {
    const int64_t tile_rows = metadata_.of_problem("tile_rows");
    const int64_t window = metadata_.of_problem("window"), ahead = metadata_.of_problem("ahead");
    const int64_t split = metadata_.of_problem("split"), block = metadata_.kv_block;
    const auto blocks_to = [block](int64_t tokens) { return (tokens + block - 1) / block; };
    int64_t needed = 0;
    for (size_t b = 0; b < lengths.size(); ++b) {
      const int64_t rows = qo_indptr[b + 1] - qo_indptr[b];
      for (int64_t offset = 0; offset < rows; offset += tile_rows) {
        const int64_t position = lengths[b] - rows + offset, held = shard_.tokens_before(lengths[b]);
        const int64_t seen = shard_.tokens_before(position + std::min(tile_rows, rows - offset) + ahead - 1);
        const int64_t end = ahead ? std::min(held, seen) : held;
        const int64_t begin = window ? std::min(shard_.tokens_before(position + 1 - window), end) : 0;
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

  Metadata metadata_;
  c10::Device device_;
  detail::Shard shard_;
  std::unique_ptr<Loader> loader_;
  std::vector<at::Tensor> state_;
  at::Tensor workspace_;
};

}  // namespace attn
