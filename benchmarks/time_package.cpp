// Times an AOTInductor package in a process without Python: time_package MODEL.pt2 INPUTS.pt LAUNCHES ROUNDS
// INPUTS.pt is a list of copies of the inputs, each a list of tensors, over which the launches rotate. Prints the median
// device time of a launch in a CUDA graph and the least host time of a call, in microseconds.
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
#include <vector>

using at::Tensor;
using Tensors = std::vector<Tensor>;

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

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const c10::InferenceMode inference;
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<Tensors> copies;
  const c10::IValue saved = torch::pickle_load(bytes);
  for (const c10::IValue& copy : saved.toListRef()) {
    copies.emplace_back();
    for (const c10::IValue& value : copy.toListRef()) copies.back().push_back(value.toTensor().to(at::kCUDA));
  }
  const int launches = std::atoi(argv[3]), rounds = std::atoi(argv[4]);

  torch::inductor::AOTIModelPackageLoader package(argv[1], "model", /*run_single_threaded=*/true);
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    for (const Tensors& inputs : copies) package.run(inputs);
    c10::cuda::device_synchronize();
    graph.capture_begin();
    for (int i = 0; i < launches; ++i) package.run(copies[i % copies.size()]);
    graph.capture_end();
    c10::cuda::device_synchronize();
  }
  std::vector<double> times;
  for (int round = 0; round <= rounds; ++round) {
    const double time = replay_microseconds(graph) / launches;
    if (round) times.push_back(time);
  }
  std::sort(times.begin(), times.end());

  double host = 1e9;
  for (int round = 0; round < rounds; ++round) {
    constexpr int calls = 100;
    c10::cuda::device_synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) package.run(copies[0]);
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
    host = std::min(host, elapsed.count() / calls);
  }
  std::cout << times[times.size() / 2] << ' ' << host << '\n';
  return 0;
}
