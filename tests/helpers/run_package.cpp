// Runs an AOTInductor package once in a process without Python: run_package MODEL.pt2 INPUTS.pt OUTPUTS.pt DEVICE
// INPUTS.pt is a list of tensors saved by torch.save; OUTPUTS.pt gets a tuple of the outputs and the mutated inputs.
// Exit status 4: the package threw. Its message is on stderr, and OUTPUTS.pt has the inputs alone.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  c10::InferenceMode inference;
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const c10::IValue saved = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : saved.toListRef()) tensors.push_back(value.toTensor().to(at::Device(argv[4])));

  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  std::vector<at::Tensor> results;
  int status = 0;
  try {
    results = package.run(tensors);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    status = 4;
  }
  results.insert(results.end(), tensors.begin(), tensors.end());

  std::vector<c10::IValue> values;
  for (const at::Tensor& t : results) values.emplace_back(t.defined() ? t.cpu() : at::empty(0));
  const std::vector<char> out = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream(argv[3], std::ios::binary).write(out.data(), static_cast<std::streamsize>(out.size()));

  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libpython") != std::string::npos) {
      std::cerr << "libpython is mapped: " << line << '\n';
      return 3;
    }
  }
  return status;
}
