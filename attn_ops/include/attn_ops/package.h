// Package: a step that attn_ops.export_package wrote.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "metadata.h"
#include "planner.h"

namespace attn {

namespace detail {

// On a GPU the code that Inductor generates copies an input whose address is not a multiple of 16 bytes: what the step
// writes to such a tensor would be lost.
inline void check_alignment(const InputSpec& spec, const at::Tensor& t) {
  constexpr uintptr_t kAlignment = 16;
  if (!spec.written || spec.device == "cpu" || t.numel() == 0) return;
  const uintptr_t beyond = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment;
  if (beyond != 0)
    fail<ShapeError>(
        "run", spec.name + " starts " + text(static_cast<int64_t>(beyond)) + " bytes after a multiple of 16 bytes",
        "an address that is a multiple of 16 bytes, since the step writes the tensor",
        "allocate it on its own, or as a view that starts at such an address");
}

}  // namespace detail

// Threads: run() may be called from several at the same time, each with a planner and outputs of its own, and with
// caches that no other running call writes. `num_runners` calls run at the same time; the others wait for one of them.
// With one runner, on CUDA, run() does not wait for the work of earlier calls. The other methods change nothing. A
// Planner and a PageTable are for one thread at a time. Any thread may make a Package or a Planner: they load in turn.
class Package {
 public:
  // On the device that the package was compiled for. On CUDA that is the current one, or `device`.
  explicit Package(const std::string& path, std::optional<c10::Device> device = std::nullopt, size_t num_runners = 1)
      : metadata_(detail::metadata_of(path, "model")),
        device_(detail::device_of("Package", metadata_, device)),
        loader_(detail::load(path, "model", device_, num_runners)),
        one_runner_(num_runners == 1) {}

  // The step on the batch that `planner` has planned. `inputs` are the tensors of forward() in order, without plan and
  // workspace. On CUDA, work is on the current stream.
  //
  // Number, dtypes, devices, sizes, strides and alignment are checked before anything runs. The package itself checks
  // what is dynamic: capacities, and that sizes agree. Both errors name the tensor, and come before anything is written.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const Planner& planner) {
    check_plan(planner);
    size_t expected = 0;
    for (const InputSpec& spec : metadata_.inputs) expected += spec.role == "input";
    if (inputs.size() != expected)
      fail<ArgumentError>(
          "run", "there are " + std::to_string(inputs.size()) + " inputs", std::to_string(expected) + ": " + names(),
          "pass the tensors of forward in order, without plan and workspace");
    std::vector<at::Tensor> all;
    size_t next_input = 0, next_field = 0;
    for (const InputSpec& spec : metadata_.inputs) {
      if (spec.role == "plan") {
        all.push_back(planner.state()[next_field++ % planner.state().size()]);
      } else if (spec.role == "workspace") {
        all.push_back(planner.workspace());
      } else {
        check(spec, inputs[next_input]);
        all.push_back(inputs[next_input++]);
      }
    }
    std::unique_lock<std::mutex> lock(running_, std::defer_lock);
    if (one_runner_) lock.lock();
    return detail::run("run", *loader_, device_, all, [this](size_t i) { return metadata_.inputs[i].name; });
  }

  // Tensors of zeros for the inputs that the argument `name` of forward() has, such as the KV caches: one for each
  // tensor of a list, dictionary or NamedTuple. Their sizes are fixed in the package.
  std::vector<at::Tensor> zeros(const std::string& name) const {
    std::vector<at::Tensor> found;
    for (const InputSpec& spec : metadata_.inputs) {
      if (spec.role != "input" || spec.name.substr(0, spec.name.find_first_of("[.")) != name) continue;
      for (const Sizes* sizes : {&spec.sizes, &spec.strides})
        if (std::find(sizes->begin(), sizes->end(), kDynamic) != sizes->end())
          fail<ShapeError>(
              "zeros", spec.name + " is " + detail::text(spec.sizes), "fixed sizes", "allocate it for each batch");
      const c10::Device device = spec.device == metadata_.device ? device_ : c10::Device(spec.device);
      const auto options = at::TensorOptions(detail::dtype_of(spec.dtype)).device(device);
      found.push_back(at::empty_strided(spec.sizes, spec.strides, options).zero_());
    }
    if (found.empty()) fail<ArgumentError>("zeros", "no input is " + name, names(), "correct the name");
    return found;
  }

  const Metadata& metadata() const { return metadata_; }
  c10::Device device() const { return device_; }

 private:
  std::string names() const {
    std::string found;
    for (const InputSpec& spec : metadata_.inputs)
      if (spec.role == "input") found += (found.empty() ? "" : ", ") + spec.name;
    return found;
  }

  void check_plan(const Planner& planner) const {
    const Metadata& other = planner.metadata();
    const char* fix = "pass the planner of this package";
    if (other.plan != metadata_.plan)
      fail<PlanError>("run", "the plan is a " + other.plan, "a " + metadata_.plan, fix);
    for (size_t i = 0; i < metadata_.fields.size(); ++i) {
      const auto& [name, sizes] = metadata_.fields[i];
      if (i >= other.fields.size() || other.fields[i] != metadata_.fields[i]) {
        const std::string found = i < other.fields.size() ? detail::text(other.fields[i].second) : "missing";
        fail<PlanError>("run", "plan." + name + " is " + found, detail::text(sizes), fix);
      }
    }
    if (other.fields.size() != metadata_.fields.size() || other.workspace != metadata_.workspace)
      fail<PlanError>(
          "run", "the workspace has " + std::to_string(other.workspace) + " elements",
          std::to_string(metadata_.workspace), fix);
    if (planner.device() != device_)
      fail<DeviceError>("run", "the plan is on " + planner.device().str(), device_.str(), fix);
  }

  void check(const InputSpec& spec, const at::Tensor& t) const {
    const char* fix = "pass tensors like the exported ones, or export the program for these sizes";
    detail::check_strided("run", spec.name, t);
    const std::string dtype = detail::dtype_name(t.scalar_type());
    const std::string device = c10::DeviceTypeName(t.device().type(), true);
    if (dtype != spec.dtype) fail<DTypeError>("run", spec.name + " is " + dtype, spec.dtype, "convert it");
    const bool elsewhere = device_.has_index() && spec.device == metadata_.device && t.device() != device_;
    if (device != spec.device || elsewhere)
      fail<DeviceError>(
          "run", spec.name + " is on " + t.device().str(), elsewhere ? device_.str() : spec.device, "move it there");
    bool fits = t.dim() == static_cast<int64_t>(spec.sizes.size());
    for (size_t d = 0; fits && d < spec.sizes.size(); ++d)
      fits = spec.sizes[d] == kDynamic || spec.sizes[d] == t.sizes()[d];
    if (!fits) fail<ShapeError>("run", spec.name + " is " + detail::text(t.sizes()), detail::text(spec.sizes), fix);
    for (size_t d = 0; t.numel() > 0 && d < spec.strides.size(); ++d)
      if (t.sizes()[d] > 1 && spec.strides[d] != kDynamic && spec.strides[d] != t.strides()[d])
        fail<ShapeError>(
            "run", spec.name + " has strides " + detail::text(t.strides()), detail::text(spec.strides), fix);
    detail::check_alignment(spec, t);
  }

  Metadata metadata_;
  c10::Device device_;
  std::unique_ptr<Loader> loader_;
  bool one_runner_;
  std::mutex running_;  // the one runner is for one thread at a time
};

}  // namespace attn
