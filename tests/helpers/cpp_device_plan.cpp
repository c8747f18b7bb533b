// Plans on a GPU that is busy: cpp_device_plan PACKAGE.pt2 TABLES.pt RESULTS.pt
// TABLES.pt is a list of page tables, each a list of tensors for plan(batch) or, of four, plan(qo_indptr, batch). Each is
// planned from tensors on the host and from tensors on the GPU while a kernel runs there; plan() must return before that
// has ended. Then a CUDA graph of plan(), captured on the first table, is replayed with the contents of every table of
// the same sizes. RESULTS.pt has the plans: of each table from the host and from the GPU, then those of the graph.
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <attn_ops/attn_ops.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

using Tensors = std::vector<at::Tensor>;

void plan(attn::Planner& planner, const Tensors& table) {
  const attn::Batch batch{table[table.size() - 3], table[table.size() - 2], table[table.size() - 1]};
  table.size() == 3 ? planner.plan(batch) : planner.plan(table[0], batch);
}

c10::IValue saved(const attn::Planner& planner) {
  std::vector<c10::IValue> found;
  for (const at::Tensor& t : planner.state()) found.emplace_back(t.numel() ? t.cpu() : at::empty({0}, at::kInt));
  return c10::ivalue::Tuple::create(found);
}

bool same_sizes(const Tensors& a, const Tensors& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = a[i].sizes() == b[i].sizes();
  return same;
}

int main(int argc, char** argv) try {
  if (argc != 4) return 2;
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue cases = torch::jit::pickle_load(bytes);
  std::vector<Tensors> host, device;
  for (const c10::IValue& one : cases.toListRef()) {
    host.emplace_back();
    device.emplace_back();
    for (const c10::IValue& value : one.toListRef()) host.back().push_back(value.toTensor());
    for (const at::Tensor& t : host.back()) device.back().push_back(t.to(at::kCUDA));
  }

  attn::Planner planner(argv[1]);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  c10::cuda::device_synchronize();  // the plan was allocated on another stream
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < host.size(); ++i)
    for (const Tensors& table : {host[i], device[i]}) {
      plan(planner, table);  // loads the kernels, and allocates pinned memory
      for (const at::Tensor& t : planner.state()) t.zero_();
      c10::cuda::device_synchronize();
      at::cuda::sleep(int64_t{1} << 29);  // some tenths of a second
      plan(planner, table);
      if (guard.current_stream().query()) {
        std::cerr << "plan() waited for the GPU\n";
        return 3;
      }
      c10::cuda::device_synchronize();
      results.push_back(saved(planner));
    }

  at::cuda::CUDAGraph graph;
  Tensors inputs;
  for (const at::Tensor& t : device[0]) inputs.push_back(t.clone());
  c10::cuda::device_synchronize();
  graph.capture_begin();
  plan(planner, inputs);
  graph.capture_end();
  for (const Tensors& table : device) {
    if (!same_sizes(table, inputs)) continue;
    for (size_t t = 0; t < table.size(); ++t) inputs[t].copy_(table[t]);
    for (const at::Tensor& t : planner.state()) t.zero_();
    graph.replay();
    c10::cuda::device_synchronize();
    results.push_back(saved(planner));
  }
  const std::vector<char> out = torch::jit::pickle_save(c10::ivalue::Tuple::create(results));
  std::ofstream(argv[3], std::ios::binary).write(out.data(), static_cast<std::streamsize>(out.size()));
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
