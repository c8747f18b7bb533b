// Runs an AOTInductor package on several inputs in a process without Python:
//   run_package_cases MODEL.pt2 CASES.pt OUTPUTS.pt run|refuse
// CASES.pt is a list of cases, each a list of tensors, of which the last holds 1 for each that stays on the CPU. A
// tensor keeps its strides and its offset in its storage.
//
// run     OUTPUTS.pt gets the outputs of each case, first from a thread of its own that has not used CUDA before, then
//         from this thread, then of a CUDA graph that is captured with the first case and replayed with the contents of
//         each.
// refuse  writes to stderr, for each case, "accepted" or the message of the exception, and the line "--- case". Before
//         torch 2.13 the package itself writes its message there. OUTPUTS.pt gets the inputs as the package left them.
// Exit status 3: Python or this library is mapped.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Loader = torch::inductor::AOTIModelPackageLoader;

static Tensor on_gpu(const Tensor& t) {
  const int64_t stored = static_cast<int64_t>(t.storage().nbytes() / t.element_size());
  const Tensor storage = t.as_strided({stored}, {1}, 0).to(at::kCUDA);
  return storage.as_strided(t.sizes(), t.strides(), t.storage_offset());
}

static std::vector<Tensors> read_cases(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<Tensors> cases;
  const c10::IValue loaded = torch::pickle_load(bytes);
  for (const c10::IValue& one : loaded.toListRef()) {
    Tensors tensors;
    for (const c10::IValue& value : one.toListRef()) tensors.push_back(value.toTensor());
    const Tensor stays = tensors.back();
    tensors.pop_back();
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!stays[static_cast<int64_t>(i)].item<int64_t>()) tensors[i] = on_gpu(tensors[i]);
    cases.push_back(tensors);
  }
  return cases;
}

static Tensors run_on_new_thread(Loader& package, const Tensors& inputs) {
  Tensors outputs;
  std::exception_ptr error;
  std::thread([&] {
    try {
      const c10::InferenceMode inference;
      outputs = package.run(inputs);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return outputs;
}

static void append_graph_replays(const char* path, const std::vector<Tensors>& cases, Tensors& results) {
  Loader package(path, "model", /*run_single_threaded=*/true);
  Tensors fixed;
  for (const Tensor& t : cases[0]) fixed.push_back(t.numel() ? t.clone() : t);
  at::cuda::CUDAGraph graph;
  Tensors outputs;
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    c10::cuda::device_synchronize();
    package.run(fixed);
    c10::cuda::device_synchronize();
    graph.capture_begin();
    outputs = package.run(fixed);
    graph.capture_end();
  }
  for (const Tensors& inputs : cases) {
    bool same_sizes = true;
    for (size_t i = 0; i < fixed.size(); ++i) same_sizes &= fixed[i].sizes() == inputs[i].sizes();
    if (!same_sizes) continue;
    for (size_t i = 0; i < fixed.size(); ++i)
      if (fixed[i].numel()) fixed[i].copy_(inputs[i]);
    for (Tensor& t : outputs) t.fill_(7);
    graph.replay();
    for (const Tensor& t : outputs) results.push_back(t.clone());
  }
}

static Tensors run_all(const char* path, const std::vector<Tensors>& cases) {
  Loader package(path);
  Tensors results;
  const auto append = [&](const Tensors& tensors) { results.insert(results.end(), tensors.begin(), tensors.end()); };
  for (const Tensors& inputs : cases) append(run_on_new_thread(package, inputs));
  for (const Tensors& inputs : cases) append(package.run(inputs));
  append_graph_replays(path, cases, results);
  return results;
}

static Tensors refuse_all(const char* path, const std::vector<Tensors>& cases) {
  Loader package(path);
  Tensors inputs_after;
  for (const Tensors& inputs : cases) {
    std::string line = "accepted";
    try {
      package.run(inputs);
    } catch (const std::exception& error) {
      line = error.what();
    }
    c10::cuda::device_synchronize();
    std::cerr << line << "\n--- case\n" << std::flush;
    inputs_after.insert(inputs_after.end(), inputs.begin(), inputs.end());
  }
  return inputs_after;
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const c10::InferenceMode inference;
  const std::vector<Tensors> cases = read_cases(argv[2]);
  const Tensors results = argv[4] == std::string("run") ? run_all(argv[1], cases) : refuse_all(argv[1], cases);
  std::vector<c10::IValue> values;
  for (const Tensor& t : results) values.emplace_back(t.cpu());
  const std::vector<char> out = torch::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream(argv[3], std::ios::binary).write(out.data(), static_cast<std::streamsize>(out.size()));

  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const bool python = line.find("libpython") != std::string::npos, ours = line.find("attn_ops") != std::string::npos;
    if (line.find(".so") != std::string::npos && (python || ours)) {
      std::cerr << "mapped: " << line << '\n';
      return 3;
    }
  }
  return 0;
}
