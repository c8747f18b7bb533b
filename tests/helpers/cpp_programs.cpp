// Programs of the tests, in one file, since the headers of libtorch take most of the time that each takes to compile:
//
//   cpp_programs calls PACKAGE.pt2 CASES.pt RESULTS.pt [PLANNER.pt2]
//   cpp_programs threads PACKAGE.pt2 CASES.pt RESULTS.pt RUNNERS CALLS
//   cpp_programs alignment
//   cpp_programs zeros PACKAGE.pt2 NAME...
//   cpp_programs message
//   cpp_programs package MODEL.pt2 INPUTS.pt OUTPUTS.pt DEVICE
//   cpp_programs rank ...: cpp_rank.cpp, which is a program of its own too
//
// The comment before each function says what it does. Exit status 1: an error of the API, which is on stderr; 2: wrong
// arguments; 3: libpython is mapped.
#define AT_PER_OPERATOR_HEADERS  // without it, headers of libtorch include every operator
#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include <attn_ops/attn_ops.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <atomic>
#include <cmath>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp_pickle.h"

#define main rank
#include "cpp_rank.cpp"
#undef main

using Tensors = std::vector<at::Tensor>;

c10::IValue load(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes);
}

void save(const char* path, const std::vector<c10::IValue>& values) {
  const std::vector<char> out = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream(path, std::ios::binary).write(out.data(), static_cast<std::streamsize>(out.size()));
}

bool libpython_is_mapped() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("libpython") != std::string::npos) return true;
  return false;
}

// A NaN stands for an undefined tensor, and an infinity for a sparse one.
Tensors tensors(const c10::IValue& value) {
  Tensors found;
  for (const c10::IValue& one : value.toListRef()) {
    const at::Tensor t = one.toTensor();
    const double mark = t.dim() == 0 ? t.item<double>() : 0;
    found.push_back(std::isnan(mark) ? at::Tensor() : std::isinf(mark) ? t.new_ones({2}).to_sparse() : t);
  }
  return found;
}

c10::IValue saved(const Tensors& list) {
  std::vector<c10::IValue> found;
  for (const at::Tensor& t : list) found.emplace_back(t.defined() && !t.is_sparse() ? t.clone() : at::empty({0}));
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

// Calls of the C++ API. CASES.pt is a list of [page table, inputs], lists of tensors. A page table of three tensors is
// for plan(batch), of four for plan(qo_indptr, batch), of two for plan_ragged(); an empty one is not planned, and
// without inputs nothing runs. RESULTS.pt has [plan and workspace, inputs, outputs] of each case afterwards. One line of
// each case is printed: "ok", or the class and the message of the exception.
int calls(int argc, char** argv) {
  if (argc != 4 && argc != 5) return 2;
  attn::Planner planner(argv[argc - 1 == 4 ? 4 : 1]);
  attn::Package step(argv[1]);
  const c10::IValue cases = load(argv[2]);
  std::vector<c10::IValue> results;
  for (const c10::IValue& one : cases.toListRef()) {
    const Tensors table = tensors(one.toListRef()[0]);
    const Tensors inputs = tensors(one.toListRef()[1]);
    Tensors outputs;
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
  save(argv[3], results);
  return libpython_is_mapped() ? 3 : 0;
}

struct Work {
  Tensors table, inputs, first;
  std::unique_ptr<attn::Planner> planner;
  int64_t differ = 0, refused = 0;

  void run(attn::Package& step, int calls) {
    Tensors bad = inputs;
    bad[0] = bad[0].to(at::kHalf);
    for (int call = 0; call < calls; ++call) {
      planner->plan({table[0], table[1], table[2]});
      const Tensors outputs = step.run(inputs, *planner);
      if (first.empty()) first = outputs;
      bool equal = outputs.size() == first.size();
      for (size_t i = 0; equal && i < outputs.size(); ++i) equal = at::equal(outputs[i], first[i]);
      differ += !equal;
      try {
        step.run(bad, *planner);
      } catch (const attn::DTypeError&) {
        ++refused;
      }
    }
  }
};

// Threads that share one package. CASES.pt is a list of [page table, inputs], lists of tensors, of one thread each,
// which has a planner of its own. Every thread loads its planner, after refused ones, then plans and runs its case CALLS
// times, while others do, with a refused call between. RESULTS.pt is a list of [the number of runs that differ from the first of the thread, refused calls,
// outputs of the first run] of each thread.
int threads(int argc, char** argv) {
  if (argc != 6) return 2;
  const c10::IValue cases = load(argv[2]);
  attn::Package step(argv[1], std::nullopt, std::stoul(argv[4]));
  std::vector<Work> all;
  for (const c10::IValue& one : cases.toListRef())
    all.push_back({tensors(one.toListRef()[0]), tensors(one.toListRef()[1]), {}, nullptr});
  std::atomic<size_t> ready{0};
  std::vector<std::thread> running;
  for (Work& work : all)
    running.emplace_back([&] {
      for (++ready; ready < all.size();) std::this_thread::yield();
      for (int i = 0; i < 100; ++i) {  // reads the metadata, and refuses the device
        try {
          attn::Planner(argv[1], at::Device(at::kCUDA, 0));
        } catch (const attn::DeviceError&) {
        }
      }
      work.planner = std::make_unique<attn::Planner>(argv[1]);
      work.run(step, std::stoi(argv[5]));
    });
  for (std::thread& thread : running) thread.join();
  std::vector<c10::IValue> results;
  for (const Work& work : all) {
    std::vector<c10::IValue> saved{at::scalar_tensor(work.differ), at::scalar_tensor(work.refused)};
    saved.insert(saved.end(), work.first.begin(), work.first.end());
    results.push_back(c10::ivalue::Tuple::create(saved));
  }
  save(argv[3], results);
  return 0;
}

// Which inputs of a package may start anywhere: prints, for an input that a step on a GPU writes or reads and for one
// of a step on the CPU, what Package::run says at 0, 4 and 16 bytes from an aligned address.
int alignment(int argc, char**) {
  if (argc != 1) return 2;
  const at::Tensor memory = at::zeros({64}), empty = at::zeros({0});
  for (const auto& [device, written] : {std::pair{"cuda", true}, {"cuda", false}, {"cpu", true}}) {
    const attn::InputSpec spec{"input", "cache", "float32", device, {8}, {1}, written};
    for (const at::Tensor& t : {memory.narrow(0, 0, 8), memory.narrow(0, 1, 8), memory.narrow(0, 4, 8), empty}) try {
        attn::detail::check_alignment(spec, t);
        std::cout << "ok\n";
      } catch (const attn::ShapeError& error) {
        std::cout << error.what() << '\n';
      }
  }
  return 0;
}

// Prints the sizes and the sum of the tensors of Package::zeros for each name, or what it says. The package is for the
// CPU, here with an index, as torch.device("cpu:0") has.
int zeros(int argc, char** argv) {
  if (argc < 3) return 2;
  const attn::Package step(argv[1], at::Device(at::kCPU, 0));
  for (int i = 2; i < argc; ++i) try {
      for (const at::Tensor& t : step.zeros(argv[i])) std::cout << t.sizes() << ' ' << t.sum().item<float>() << ' ';
      std::cout << '\n';
    } catch (const attn::Error& error) {
      std::cout << name(error) << ": " << error.what() << '\n';
    }
  return 0;
}

// Prints what the API says of an assertion of torch that fails, as it is and as a package throws it.
int message(int argc, char**) {
  if (argc != 1) return 2;
  try {
    TORCH_CHECK(false, "index out of bounds");
  } catch (const c10::Error& error) {
    std::cout << attn::detail::message(error) << '\n' << attn::detail::message(std::runtime_error(error.what())) << '\n';
  }
  return 0;
}

// Runs an AOTInductor package once. INPUTS.pt is a list of tensors saved by torch.save; OUTPUTS.pt gets a tuple of the
// outputs and the mutated inputs. Exit status 4: the package threw. Its message is on stderr, and OUTPUTS.pt has only
// the inputs.
int package(int argc, char** argv) {
  if (argc != 5) return 2;
  c10::InferenceMode inference;
  const c10::IValue saved = load(argv[2]);
  Tensors inputs;
  for (const c10::IValue& value : saved.toListRef()) inputs.push_back(value.toTensor().to(at::Device(argv[4])));

  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  Tensors results;
  int status = 0;
  try {
    results = loader.run(inputs);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    status = 4;
  }
  results.insert(results.end(), inputs.begin(), inputs.end());

  std::vector<c10::IValue> values;
  for (const at::Tensor& t : results) values.emplace_back(t.defined() ? t.cpu() : at::empty(0));
  save(argv[3], values);
  return libpython_is_mapped() ? 3 : status;
}

int main(int argc, char** argv) try {
  const std::map<std::string, int (*)(int, char**)> programs{
      {"calls", calls}, {"threads", threads}, {"alignment", alignment}, {"zeros", zeros}, {"message", message},
      {"package", package}, {"rank", rank}};
  const auto program = programs.find(argc > 1 ? argv[1] : "");
  return program == programs.end() ? 2 : program->second(argc - 1, argv + 1);
} catch (const attn::Error& error) {
  std::cerr << name(error) << ": " << error.what() << '\n';
  return 1;
}
