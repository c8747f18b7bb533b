// One rank without Python: cpp_rank PACKAGE.pt2 STORE RANK WORLD GROUP INPUTS.pt RESULT.pt
// The step in the package contains a collective of GROUP, a process group that this program makes and registers.
// INPUTS.pt has kv_indptr, kv_indices, kv_last_page_len, then the inputs of the step; RESULT.pt gets its outputs.
#define AT_PER_OPERATOR_HEADERS  // as in cpp_programs.cpp, which includes this file
#include <attn_ops/attn_ops.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "cpp_pickle.h"

// Gathers through the store. A server takes ProcessGroupNCCL; the header of Gloo needs others that the wheel has not.
class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "store"; }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < inputs.size(); ++i) gather(outputs[i], inputs[i].contiguous());
    return c10::make_intrusive<Done>();
  }

 private:
  struct Done : c10d::Work {
    bool isCompleted() override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
  };

  void gather(at::Tensor& output, const at::Tensor& own) {
    const std::string step = std::to_string(step_++) + "/";
    const auto* bytes = static_cast<const uint8_t*>(own.const_data_ptr());
    store_->set(step + std::to_string(getRank()), std::vector<uint8_t>(bytes, bytes + own.nbytes()));
    auto* target = static_cast<uint8_t*>(output.data_ptr());
    for (int rank = 0; rank < getSize(); ++rank, target += own.nbytes())
      std::memcpy(target, store_->get(step + std::to_string(rank)).data(), own.nbytes());
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int step_ = 0;
};

int main(int argc, char** argv) try {
  if (argc != 8) return 2;
  const int rank = std::stoi(argv[3]), world = std::stoi(argv[4]);
  const std::string name = argv[5];
  auto store = c10::make_intrusive<c10d::FileStore>(argv[2], world);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, world);
  const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(c10::DeviceType::CPU, custom, c10::make_intrusive<StoreBackend>(store, rank, world));
  group->setDefaultBackend(custom);
  group->setGroupName(name);
  c10d::register_process_group(name, group);

  std::ifstream file(argv[6], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue saved = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& value : saved.toListRef()) inputs.push_back(value.toTensor());
  attn::Planner planner(argv[1]);
  attn::Package step(argv[1]);
  planner.plan({inputs[0], inputs[1], inputs[2]});
  const std::vector<at::Tensor> outputs = step.run({inputs.begin() + 3, inputs.end()}, planner);
  const std::vector<c10::IValue> values(outputs.begin(), outputs.end());
  const std::vector<char> result = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream(argv[7], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
