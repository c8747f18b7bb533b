// Launches compiled kernels (images) through the CUDA driver. C++17, the standard library and libcuda by dlopen alone.
//
// An image is a cubin with a table of its parameters. A call gives tensors, integers and floats; the table says what
// each must be and which parameter it becomes. Every check is made before the launch, so a call that fails has written
// nothing. attn_ops/native/images.py writes the tables.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace attn_ops {

enum class Code : int32_t {
  kOk = 0,
  kBadCall,      // numbers of arguments, grid or integers that do not fit the image
  kBadTensor,    // dtype, sizes, strides, alignment
  kBadDevice,    // a tensor on another device, or an image for another GPU
  kNoImage,      // no image of that name
  kNoDriver,     // libcuda is absent or too old for the launcher or the image
  kDriverError,  // a call of the driver failed
};

struct Status {
  Code code = Code::kOk;
  std::string text;  // what is wrong, what was expected, how to fix it; empty if ok
};

constexpr int kMaxDevices = 64, kMaxRank = 5, kMaxMaps = 8, kMaxParameters = 128;

enum class Kind : uint8_t {
  kPointer,    // address of tensor `index`
  kInt32,      // next integer
  kInt64,      // next integer
  kFloat32,    // next float
  kTensorMap,  // tensor map `index`, over the next 2 * rank integers: sizes, then strides in elements, outermost first
  kNull,       // a null pointer
};

struct Parameter {
  Kind kind;
  uint8_t index;
  const char* name;
};

// Sizes and strides of a tensor are integers of the call, in the order of the tensors: all sizes, then all strides.
struct TensorSpec {
  const char* name;
  int32_t dtype;  // c10::ScalarType
  uint8_t rank;
  uint8_t alignment;  // bytes that the address is a multiple of
};

struct MapSpec {
  uint8_t tensor, type, swizzle, rank, element_bytes;  // type: CUtensorMapDataType
  uint32_t box[kMaxRank];                              // outermost first
};

// The kernel on each device, loaded by its first call there. Its modules are unloaded with the shared library: CUDA
// graphs that launch the kernel must not be replayed after that.
struct LoadedFunctions {
  std::atomic<void*> of[kMaxDevices];
  void* modules[kMaxDevices];
  ~LoadedFunctions();
};

struct Image {
  const char *name, *function;
  const unsigned char* cubin;
  LoadedFunctions* loaded;
  int32_t compute_capability;  // 90: exactly 9.0
  uint32_t threads, shared_bytes;
  uint32_t cluster[3];
  bool pdl;
  const TensorSpec* tensors;
  uint32_t num_tensors;
  const MapSpec* maps;
  uint32_t num_maps;
  const Parameter* parameters;
  uint32_t num_parameters;
};

struct TensorView {
  void* address;
  const int64_t *sizes, *strides;
  int32_t dtype, device_type, device;
  int64_t rank;
};

struct Call {
  const TensorView* tensors;
  size_t num_tensors;
  const int64_t* integers;  // the grid, sizes and strides of each tensor, then those of the parameters in their order
  size_t num_integers;
  const double* floats;
  size_t num_floats;
  int32_t device_type;  // c10::DeviceType that tensors must have
  void* stream;
};

const Image* find_image(const Image* images, size_t count, const char* name);

Status launch(const Image& image, const Call& call);

// Launches without a look at the tensors, of which `call` has the addresses alone: for a caller whose cache key says
// what they are. `call.integers` are the grid and those of the parameters.
Status launch_prepared(const Image& image, const Call& call, int device);

// Loads the kernel on the device, which its first launch there does otherwise.
Status load(const Image& image, int device);

void use_driver(const char* path);  // in the place of libcuda.so.1

int current_device();  // of this thread, -1 if it has not used CUDA

bool is_capturing(void* stream);

Status no_such_image(const char* name);

}  // namespace attn_ops
