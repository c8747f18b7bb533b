// Calls of the C++ API, driven by a test: cpp_api PACKAGE.pt2 CASES.pt RESULTS.pt [PLANNER.pt2]
// CASES.pt is a list of [page table, inputs], lists of tensors. A page table of three tensors is for plan(batch), of four
// for plan(qo_indptr, batch), of two for plan_ragged(); an empty one is not planned, and without inputs nothing runs.
// An input of one NaN stands for an undefined tensor. RESULTS.pt has [plan and workspace, inputs, outputs] of each case
// afterwards. One line of each case is printed: "ok", or the class and the message of the exception.
#include <attn_ops/attn_ops.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

using Tensors = std::vector<at::Tensor>;

Tensors tensors(const c10::IValue& value) {
  Tensors found;
  for (const c10::IValue& one : value.toListRef()) found.push_back(one.toTensor());
  return found;
}

c10::IValue saved(const Tensors& list) {
  std::vector<c10::IValue> found;
  for (const at::Tensor& t : list) found.emplace_back(t.defined() ? t.clone() : at::empty({0}));
  return c10::ivalue::Tuple::create(found);
}

Tensors call(attn::Planner& planner, attn::Package& step, const Tensors& table, const Tensors& inputs) {
  if (table.size() == 2) planner.plan_ragged(table[0], table[1]);
  if (table.size() == 3) planner.plan({table[0], table[1], table[2]});
  if (table.size() == 4) planner.plan(table[0], {table[1], table[2], table[3]});
  return inputs.empty() ? Tensors{} : step.run(inputs, planner);
}

// The name of the most derived class of `error` among those of the API.
std::string name(const attn::Error& error) {
#define ATTN_NAME(type) \
  if (dynamic_cast<const attn::type*>(&error)) return #type;
  ATTN_NAME(CapacityError)
  ATTN_NAME(PageTableError)
  ATTN_NAME(PlanError)
  ATTN_NAME(ShapeError)
  ATTN_NAME(DTypeError)
  ATTN_NAME(DeviceError)
  ATTN_NAME(OptionError)
  ATTN_NAME(ArgumentError)
  ATTN_NAME(PackageError)
#undef ATTN_NAME
  return "Error";
}

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return 2;
  try {
    attn::Planner planner(argv[argc - 1 == 4 ? 4 : 1]);
    attn::Package step(argv[1]);
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const c10::IValue cases = torch::jit::pickle_load(bytes);
    std::vector<c10::IValue> results;
    for (const c10::IValue& one : cases.toListRef()) {
      const Tensors table = tensors(one.toListRef()[0]);
      Tensors inputs = tensors(one.toListRef()[1]), outputs;
      for (at::Tensor& t : inputs)
        if (t.dim() == 0 && t.isnan().item<bool>()) t = at::Tensor();
      try {
        outputs = call(planner, step, table, inputs);
        std::cout << "ok\n";
      } catch (const attn::Error& error) {
        std::string message = error.what();
        for (char& c : message)
          if (c == '\n') c = ' ';
        std::cout << name(error) << ": " << message << '\n';
      }
      Tensors owned = planner.state();
      owned.push_back(planner.workspace());
      results.push_back(c10::ivalue::Tuple::create({saved(owned), saved(inputs), saved(outputs)}));
    }
    const std::vector<char> out = torch::jit::pickle_save(c10::ivalue::Tuple::create(results));
    std::ofstream(argv[3], std::ios::binary).write(out.data(), static_cast<std::streamsize>(out.size()));
  } catch (const attn::Error& error) {
    std::cerr << name(error) << ": " << error.what() << '\n';
    return 1;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("libpython") != std::string::npos) return 3;
}
