// Times an AOTInductor package in a process without Python: time_package MODEL.pt2 INPUTS.pt LAUNCHES
// INPUTS.pt is a list of tensors, and a list of copies of the inputs, over which the launches rotate: each a list of
// positions among the tensors. What copies have in common is on the GPU once, as it is in the eager process. For each
// line of its input, replays a CUDA graph of that number of launches and prints the device time in microseconds. At the
// end of the input prints the nodes of a launch and the least host time of a call in microseconds.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Package = torch::inductor::AOTIModelPackageLoader;

static double replay_microseconds(at::cuda::CUDAGraph& graph) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  cudaEvent_t begin, end;
  float milliseconds = 0;
  C10_CUDA_CHECK(cudaEventCreate(&begin));
  C10_CUDA_CHECK(cudaEventCreate(&end));
  C10_CUDA_CHECK(cudaEventRecord(begin, stream));
  graph.replay();
  C10_CUDA_CHECK(cudaEventRecord(end, stream));
  C10_CUDA_CHECK(cudaEventSynchronize(end));
  C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  C10_CUDA_CHECK(cudaEventDestroy(begin));
  C10_CUDA_CHECK(cudaEventDestroy(end));
  return milliseconds * 1000;
}

static void capture(at::cuda::CUDAGraph& graph, Package& package, const std::vector<Tensors>& copies, int launches) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  for (const Tensors& inputs : copies) package.run(inputs);
  c10::cuda::device_synchronize();
  graph.capture_begin();
  for (int i = 0; i < launches; ++i) package.run(copies[i % copies.size()]);
  graph.capture_end();
  c10::cuda::device_synchronize();
}

static size_t count_nodes(Package& package, const std::vector<Tensors>& copies) {
  at::cuda::CUDAGraph graph(/*keep_graph=*/true);
  size_t nodes = 0;
  capture(graph, package, copies, 1);
  C10_CUDA_CHECK(cudaGraphGetNodes(graph.raw_cuda_graph(), nullptr, &nodes));
  return nodes;
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const c10::InferenceMode inference;
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const auto saved = torch::pickle_load(bytes).toTuple();
  Tensors tensors;
  for (const c10::IValue& value : saved->elements()[0].toListRef()) tensors.push_back(value.toTensor().to(at::kCUDA));
  std::vector<Tensors> copies;
  for (const c10::IValue& copy : saved->elements()[1].toListRef()) {
    copies.emplace_back();
    for (const c10::IValue& position : copy.toListRef()) copies.back().push_back(tensors.at(position.toInt()));
  }
  const int launches = std::atoi(argv[3]);

  Package package(argv[1], "model", /*run_single_threaded=*/true);
  at::cuda::CUDAGraph graph;
  capture(graph, package, copies, launches);
  for (std::string line; std::getline(std::cin, line);) std::cout << replay_microseconds(graph) << std::endl;

  constexpr int rounds = 15, calls = 100;
  double host = 1e9;
  for (int round = 0; round < rounds; ++round) {
    c10::cuda::device_synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) package.run(copies[0]);
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
    host = std::min(host, elapsed.count() / calls);
  }
  std::cout << count_nodes(package, copies) << ' ' << host << std::endl;
  return 0;
}
