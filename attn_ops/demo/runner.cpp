// Greedy decoding from two AOTInductor packages, in a process without Python.
//
//   runner plan.pt2 decode.pt2 state.pt steps repeats device
//
// state.pt, written with torch.save, is a dictionary of what the steps were exported for:
//   tokens      int64 [batch]            last token of each request, not yet in the KV cache
//   lengths     int32 [batch]            tokens of each request in the KV cache, 0 for an empty slot
//   page_table  int32 [batch, per_slot]  pages allocated to each request
//   page_size   int32 []
//   kv_indices  int32 [capacity]         its size is the page capacity of the plan
//   caches, plan, workspace              as the decode step takes them
// `device` is the device that the packages are compiled for.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Loader = torch::inductor::AOTIModelPackageLoader;

struct State {
  explicit State(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    TORCH_CHECK(file, "cannot read ", path);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto dict = torch::jit::pickle_load(bytes).toGenericDict();
    tokens = dict.at("tokens").toTensor();
    lengths = dict.at("lengths").toTensor();
    pages = dict.at("page_table").toTensor();
    page_size = dict.at("page_size").toTensor().item<int32_t>();
    kv_indices = dict.at("kv_indices").toTensor();
    for (const auto& cache : dict.at("caches").toListRef()) caches.push_back(cache.toTensor());
    for (const auto& field : dict.at("plan").toListRef()) plan.push_back(field.toTensor());
    workspace = dict.at("workspace").toTensor();
  }

  void to(c10::Device device) {
    for (Tensor* t : {&tokens, &workspace}) *t = t->to(device);
    for (auto* list : {&caches, &plan})
      for (Tensor& t : *list) t = t.to(device);
  }

  Tensor tokens, lengths, pages, kv_indices, workspace;
  std::vector<Tensor> caches, plan;
  int32_t page_size = 0;
};

// The page table of a batch whose requests have `lengths` tokens, in the order of the plan step's inputs.
std::vector<Tensor> page_table(const State& state, const Tensor& lengths) {
  const int64_t batch = lengths.numel();
  auto indptr = at::zeros({batch + 1}, at::kInt);
  auto indices = at::zeros_like(state.kv_indices);
  auto last = at::zeros({batch}, at::kInt);
  const auto pages = state.pages.accessor<int32_t, 2>();
  const auto length = lengths.accessor<int32_t, 1>();
  int32_t* end = indices.data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t count = (length[b] + state.page_size - 1) / state.page_size;
    TORCH_CHECK(count <= pages.size(1), "request ", b, " needs ", count, " pages and has ", pages.size(1), "; lower the number of steps");
    end = std::copy_n(pages[b].data(), count, end);
    indptr[b + 1] = end - indices.data_ptr<int32_t>();
    last[b] = length[b] - std::max(count - 1, 0) * state.page_size;
  }
  return {indptr, indices, last};
}

// Decodes `steps` tokens of every request greedily: int64 [steps, batch]. A repeat writes the same cache positions.
Tensor decode(Loader& planner, Loader& decoder, const State& state, int steps, c10::Device device) {
  Tensor tokens = state.tokens, lengths = state.lengths;
  const Tensor active = (lengths > 0).to(at::kInt);
  std::vector<Tensor> decoded;
  for (int step = 0; step < steps; ++step) {
    lengths = lengths + active;
    std::vector<Tensor> inputs;
    for (const Tensor& t : page_table(state, lengths)) inputs.push_back(t.to(device));
    inputs.insert(inputs.end(), state.plan.begin(), state.plan.end());
    planner.run(inputs);

    inputs = {tokens};
    inputs.insert(inputs.end(), state.caches.begin(), state.caches.end());
    inputs.insert(inputs.end(), state.plan.begin(), state.plan.end());
    inputs.push_back(state.workspace);
    tokens = decoder.run(inputs).at(0);
    decoded.push_back(tokens);
  }
  return at::stack(decoded).cpu();
}

bool maps_python() {
  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  return text.find("libpython") != std::string::npos || text.find("libtorch_python") != std::string::npos;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 7, "usage: runner plan.pt2 decode.pt2 state.pt steps repeats device");
  const c10::InferenceMode inference_mode;
  const c10::Device device(argv[6]);
  const c10::DeviceGuard device_guard(device);
  Loader planner(argv[1], "model", false, 1, device.index()), decoder(argv[2], "model", false, 1, device.index());
  State state(argv[3]);
  const int steps = std::stoi(argv[4]), repeats = std::stoi(argv[5]);
  state.to(device);

  Tensor decoded = decode(planner, decoder, state, steps, device);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds_now();
    decoded = decode(planner, decoder, state, steps, device);
    best = std::min(best, seconds_now() - start);
  }

  std::cout << "python " << (maps_python() ? "mapped" : "absent") << "\nseconds " << best << "\n";
  for (int64_t step = 0; step < decoded.size(0); ++step) {
    std::cout << "tokens";
    for (int64_t b = 0; b < decoded.size(1); ++b) std::cout << ' ' << decoded[step][b].item<int64_t>();
    std::cout << '\n';
  }
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
