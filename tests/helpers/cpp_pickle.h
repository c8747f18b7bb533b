// What the programs of the tests use of torch/csrc/jit/serialization/pickle.h, whose headers take 3 s to compile.
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

namespace torch::jit {

std::vector<char> pickle_save(const c10::IValue& ivalue);
c10::IValue pickle_load(const std::vector<char>& data);

}  // namespace torch::jit
