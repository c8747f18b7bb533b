#include "launcher.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "driver.h"

#ifndef ATTN_OPS_LIBCUDA
#define ATTN_OPS_LIBCUDA "libcuda.so.1"
#endif

namespace attn_ops {
namespace {

constexpr int kOldestDriver = 12000;  // the first with tensor maps
const char* const kLikeExported = "pass tensors like the exported ones, or export the program for these";

__attribute__((format(printf, 2, 3))) Status failure(Code code, const char* format, ...) {
  char text[640];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return {code, text};
}

// ---- The driver ---------------------------------------------------------------------------------------------------

struct Driver {
  decltype(&cuDriverGetVersion) version;
  decltype(&cuGetErrorString) describe;
  decltype(&cuDeviceGetAttribute) attribute;
  decltype(&cuDevicePrimaryCtxRetain) retain;
  decltype(&cuDevicePrimaryCtxRelease_v2) release;
  decltype(&cuCtxGetCurrent) current;
  decltype(&cuCtxGetDevice) device;
  decltype(&cuCtxPushCurrent_v2) push;
  decltype(&cuCtxPopCurrent_v2) pop;
  decltype(&cuThreadExchangeStreamCaptureMode) capture_mode;
  decltype(&cuStreamIsCapturing) is_capturing;
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleUnload) unload;
  decltype(&cuModuleGetFunction) function;
  decltype(&cuFuncSetAttribute) set_attribute;
  decltype(&cuFuncSetCacheConfig) set_cache;
  decltype(&cuTensorMapEncodeTiled) encode;
  decltype(&cuLaunchKernelEx) launch;
  Status status;

  explicit Driver(const char* path);
};

Driver::Driver(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    status = failure(Code::kNoDriver, "launch_image: %s; expected the library of the CUDA driver; install the driver",
                     dlerror());
    return;
  }
  const struct {
    const char* name;
    void* function;
  } table[] = {
      {"cuDriverGetVersion", &version},
      {"cuGetErrorString", &describe},
      {"cuDeviceGetAttribute", &attribute},
      {"cuDevicePrimaryCtxRetain", &retain},
      {"cuDevicePrimaryCtxRelease_v2", &release},
      {"cuCtxGetCurrent", &current},
      {"cuCtxGetDevice", &device},
      {"cuCtxPushCurrent_v2", &push},
      {"cuCtxPopCurrent_v2", &pop},
      {"cuThreadExchangeStreamCaptureMode", &capture_mode},
      {"cuStreamIsCapturing", &is_capturing},
      {"cuModuleLoadData", &load},
      {"cuModuleUnload", &unload},
      {"cuModuleGetFunction", &function},
      {"cuFuncSetAttribute", &set_attribute},
      {"cuFuncSetCacheConfig", &set_cache},
      {"cuTensorMapEncodeTiled", &encode},
      {"cuLaunchKernelEx", &launch},
  };
  const char* missing = nullptr;
  for (const auto& row : table) {
    void* found = dlsym(library, row.name);
    if (!found && !missing) missing = row.name;
    std::memcpy(row.function, &found, sizeof found);
  }
  int number = 0;
  if (version) version(&number);
  if (missing || number < kOldestDriver)
    status = failure(Code::kNoDriver,
                     "launch_image: the CUDA driver is for CUDA %d.%d%s%s; expected one for CUDA %d.%d or newer; update "
                     "the driver",
                     number / 1000, number % 1000 / 10, missing ? " and has no " : "", missing ? missing : "",
                     kOldestDriver / 1000, kOldestDriver % 1000 / 10);
}

std::atomic<const Driver*> used_driver;

const Driver& driver() {
  const Driver* used = used_driver.load(std::memory_order_acquire);
  if (used) return *used;
  static const Driver& loaded = *new Driver(ATTN_OPS_LIBCUDA);  // never deleted: kernels are unloaded at the very end
  const Driver* none = nullptr;
  used_driver.compare_exchange_strong(none, &loaded);
  return *used_driver.load(std::memory_order_acquire);
}

Status driver_failure(const Image& image, const char* what, CUresult code) {
  const char* reason = nullptr;
  driver().describe(code, &reason);
  return failure(Code::kDriverError, "launch_image: image %s: %s: %s (CUDA error %d)", image.name, what,
                 reason ? reason : "unknown", static_cast<int>(code));
}

// The primary contexts that this library has retained. Defined before the images, so released after they are unloaded.
struct PrimaryContexts {
  std::atomic<CUcontext> of[kMaxDevices];
  ~PrimaryContexts() {
    for (int device = 0; device < kMaxDevices; ++device)
      if (of[device]) driver().release(device);  // at the end of the process the driver may be gone: it answers an error
  }
} primary;

// The primary context of the device, current in this object's life: a thread may have none or another one.
class CurrentContext {
 public:
  CurrentContext(const Image& image, int device) {
    static std::mutex mutex;
    CUcontext context = primary.of[device].load(std::memory_order_acquire);
    if (!context) {
      const std::lock_guard<std::mutex> lock(mutex);
      context = primary.of[device].load(std::memory_order_relaxed);
      if (!context) {
        const CUresult code = driver().retain(&context, device);
        if (code != CUDA_SUCCESS) {
          status = driver_failure(image, "the device has no context", code);
          return;
        }
        primary.of[device].store(context, std::memory_order_release);
      }
    }
    CUcontext current = nullptr;
    if (driver().current(&current) == CUDA_SUCCESS && current == context) return;
    const CUresult code = driver().push(context);
    pushed_ = code == CUDA_SUCCESS;
    if (!pushed_) status = driver_failure(image, "the context of the device cannot be made current", code);
  }
  ~CurrentContext() {
    CUcontext popped;
    if (pushed_) driver().pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  Status status;

 private:
  bool pushed_ = false;
};

// In this object's life the thread may load a kernel while a stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().capture_mode(&mode_); }
  ~RelaxedCapture() { driver().capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

Status check_device(const Image& image, int device) {
  if (device >= 0 && device < kMaxDevices) return {};
  return failure(Code::kBadDevice,
                 "launch_image: image %s: the first tensor is on device %d; expected one of the first %d GPUs; move the "
                 "tensors there",
                 image.name, device, kMaxDevices);
}

Status check_gpu(const Image& image, int device) {
  int major = 0, minor = 0;
  CUresult code = driver().attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  if (code == CUDA_SUCCESS)
    code = driver().attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  if (code != CUDA_SUCCESS) return driver_failure(image, "the device cannot be queried", code);
  if (10 * major + minor == image.compute_capability) return {};
  return failure(Code::kBadDevice,
                 "launch_image: image %s: device %d has compute capability %d.%d; expected %d.%d; run the package on "
                 "such a GPU, or package the program on this one",
                 image.name, device, major, minor, image.compute_capability / 10, image.compute_capability % 10);
}

// The driver that the cubin needs: compilers of CUDA 13 write version 8 of the ELF ABI, those of CUDA 12 version 7.
// Within a major version, an older driver loads the cubins of a newer compiler.
int needed_driver(const Image& image) {
  return !std::memcmp(image.cubin, "\177ELF", 4) && image.cubin[8] >= 8 ? 13000 : kOldestDriver;
}

Status check_driver(const Image& image) {
  const int needed = needed_driver(image);
  int number = 0;
  driver().version(&number);
  if (number >= needed) return {};
  return failure(Code::kNoDriver,
                 "launch_image: image %s: it was compiled for CUDA %d, and the CUDA driver is for CUDA %d.%d; expected a "
                 "driver for CUDA %d.%d or newer; update the driver, or package the program with an older Triton",
                 image.name, needed / 1000, number / 1000, number % 1000 / 10, needed / 1000, needed % 1000 / 10);
}

// The kernel on the current device, loaded by its first call.
Status load_function(const Image& image, int device, CUfunction* function) {
  static std::mutex mutex;
  std::atomic<void*>& loaded = image.loaded->of[device];
  *function = static_cast<CUfunction>(loaded.load(std::memory_order_acquire));
  if (*function) return {};
  const std::lock_guard<std::mutex> lock(mutex);
  *function = static_cast<CUfunction>(loaded.load(std::memory_order_relaxed));
  if (*function) return {};
  Status status = check_gpu(image, device);
  if (status.code == Code::kOk) status = check_driver(image);
  if (status.code != Code::kOk) return status;
  const RelaxedCapture relaxed;
  CUmodule module = nullptr;
  CUfunction found = nullptr;
  CUresult code = driver().load(&module, image.cubin);
  if (code != CUDA_SUCCESS)
    return driver_failure(image, "cannot be loaded; expected a driver as new as the compiler; update the driver", code);
  code = driver().function(&found, module, image.function);
  if (code == CUDA_SUCCESS && image.shared_bytes > 48 << 10) {
    code = driver().set_cache(found, CU_FUNC_CACHE_PREFER_SHARED);
    if (code == CUDA_SUCCESS)
      code = driver().set_attribute(found, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    static_cast<int>(image.shared_bytes));
  }
  if (code != CUDA_SUCCESS) {
    driver().unload(module);
    return driver_failure(image, "its function cannot be loaded", code);
  }
  image.loaded->modules[device] = module;
  loaded.store(found, std::memory_order_release);
  *function = found;
  return {};
}

// ---- Checks -------------------------------------------------------------------------------------------------------

const char* dtype_name(int dtype) {
  static const char* const names[] = {"uint8",    "int8",       "int16",   "int32", "int64", "float16",
                                      "float32",  "float64",    nullptr,   nullptr, nullptr, "bool",
                                      nullptr,    nullptr,      nullptr,   "bfloat16"};
  const char* name = dtype >= 0 && dtype < static_cast<int>(sizeof names / sizeof *names) ? names[dtype] : nullptr;
  return name ? name : dtype == 23 ? "float8_e5m2" : dtype == 24 ? "float8_e4m3fn" : "of another dtype";
}

Status check_counts(const Image& image, const Call& call) {
  size_t integers = 3, floats = 0;
  for (uint32_t i = 0; i < image.num_tensors; ++i) integers += 2 * image.tensors[i].rank;
  for (uint32_t i = 0; i < image.num_parameters; ++i) {
    const Parameter& p = image.parameters[i];
    integers += p.kind == Kind::kInt32 || p.kind == Kind::kInt64;
    integers += p.kind == Kind::kTensorMap ? 2 * image.maps[p.index].rank : 0;
    floats += p.kind == Kind::kFloat32;
  }
  if (call.num_tensors == image.num_tensors && call.num_integers == integers && call.num_floats == floats &&
      image.num_parameters <= kMaxParameters && image.num_maps <= kMaxMaps)
    return {};
  return failure(Code::kBadCall,
                 "launch_image: image %s: %zu tensors, %zu integers and %zu floats; expected %u, %zu and %zu; package "
                 "the program again",
                 image.name, call.num_tensors, call.num_integers, call.num_floats, image.num_tensors, integers, floats);
}

Status check_tensor(const Image& image, const TensorSpec& spec, const TensorView& t, const TensorView& first,
                    int32_t device_type, const int64_t* expected) {
  const char *tensor = spec.name, *name = image.name;
  if (t.device_type != device_type || t.device != first.device)
    return failure(Code::kBadDevice,
                   "launch_image: image %s: %s is on device %d of type %d; expected device %d of type %d; move the "
                   "tensor there",
                   name, tensor, t.device, t.device_type, first.device, device_type);
  if (t.dtype != spec.dtype)
    return failure(Code::kBadTensor, "launch_image: image %s: %s is %s; expected %s; %s", name, tensor,
                   dtype_name(t.dtype), dtype_name(spec.dtype), kLikeExported);
  if (t.rank != spec.rank)
    return failure(Code::kBadTensor, "launch_image: image %s: %s has %lld dimensions; expected %d; %s", name, tensor,
                   static_cast<long long>(t.rank), spec.rank, kLikeExported);
  bool empty = false;
  for (int d = 0; d < spec.rank; ++d) {
    empty |= t.sizes[d] == 0;
    if (t.sizes[d] != expected[d])
      return failure(Code::kBadTensor, "launch_image: image %s: size %d of %s is %lld; expected %lld; %s", name, d,
                     tensor, static_cast<long long>(t.sizes[d]), static_cast<long long>(expected[d]), kLikeExported);
  }
  for (int d = 0; d < spec.rank && !empty; ++d)
    if (t.sizes[d] > 1 && t.strides[d] != expected[spec.rank + d])
      return failure(Code::kBadTensor, "launch_image: image %s: stride %d of %s is %lld; expected %lld; %s", name, d,
                     tensor, static_cast<long long>(t.strides[d]), static_cast<long long>(expected[spec.rank + d]),
                     kLikeExported);
  if (!empty && reinterpret_cast<uintptr_t>(t.address) % spec.alignment)
    return failure(Code::kBadTensor,
                   "launch_image: image %s: the address of %s is %p; expected a multiple of %d bytes; pass a tensor "
                   "that starts at such an address",
                   name, tensor, t.address, spec.alignment);
  return {};
}

Status check_grid(const Image& image, const int64_t* grid) {
  constexpr int64_t most[] = {INT32_MAX, 65535, 65535};
  for (int d = 0; d < 3; ++d)
    if (grid[d] < 0 || grid[d] > most[d])
      return failure(Code::kBadCall, "launch_image: image %s: the grid has size %lld in dimension %d; expected 0 to %lld; "
                     "call with fewer rows", image.name, static_cast<long long>(grid[d]), d,
                     static_cast<long long>(most[d]));
  return {};
}

// ---- Parameters ---------------------------------------------------------------------------------------------------

union Value {
  void* pointer;
  int64_t wide;
  int32_t narrow;
  float real;
};

struct Parameters {
  CUtensorMap maps[kMaxMaps];
  Value values[kMaxParameters];
  void* pointers[kMaxParameters];
};

bool narrow(int64_t value, Value& to) {
  to.narrow = static_cast<int32_t>(value);
  return to.narrow == value;
}

// `integers` are the map's sizes and strides. A map over no elements is left zero: a kernel loads nothing through it.
CUresult encode_map(const MapSpec& spec, void* address, const int64_t* integers, CUtensorMap* map) {
  uint64_t sizes[kMaxRank], strides[kMaxRank];
  uint32_t box[kMaxRank], steps[kMaxRank];
  std::memset(map, 0, sizeof *map);
  const int rank = spec.rank;
  for (int d = 0; d < rank; ++d) {  // outermost first here, innermost first in the driver
    const int at = rank - 1 - d;
    if (integers[d] <= 0) return CUDA_SUCCESS;
    sizes[at] = static_cast<uint64_t>(integers[d]);
    box[at] = spec.box[d];
    steps[at] = 1;
    if (at) strides[at - 1] = static_cast<uint64_t>(integers[rank + d]) * spec.element_bytes;
  }
  return driver().encode(map, spec.type, static_cast<uint32_t>(rank), address, sizes, strides, box, steps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, spec.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

Status fill_parameters(const Image& image, const Call& call, const int64_t* integers, Parameters& to) {
  const double* floats = call.floats;
  for (uint32_t i = 0; i < image.num_parameters; ++i) {
    const Parameter& p = image.parameters[i];
    Value& value = to.values[i];
    value.wide = 0;
    to.pointers[i] = &value;
    bool fits = true;
    switch (p.kind) {
      case Kind::kNull: break;
      case Kind::kPointer: value.pointer = call.tensors[p.index].address; break;
      case Kind::kFloat32: value.real = static_cast<float>(*floats++); break;
      case Kind::kInt64: value.wide = *integers++; break;
      case Kind::kInt32: fits = narrow(*integers++, value); break;
      case Kind::kTensorMap: {
        const MapSpec& spec = image.maps[p.index];
        const CUresult code = encode_map(spec, call.tensors[spec.tensor].address, integers, &to.maps[p.index]);
        if (code != CUDA_SUCCESS) return driver_failure(image, "its tensor map cannot be encoded", code);
        to.pointers[i] = &to.maps[p.index];
        integers += 2 * spec.rank;
      }
    }
    if (!fits)
      return failure(Code::kBadCall,
                     "launch_image: image %s: %s does not fit in 32 bits; expected a size below 2147483648; pass smaller "
                     "tensors", image.name, p.name);
  }
  return {};
}

// `integers` are those of the parameters. The tensors are as the image expects them.
Status launch_checked(const Image& image, const Call& call, int device, const int64_t* integers) {
  const int64_t* grid = call.integers;
  Status status = check_grid(image, grid);
  if (status.code != Code::kOk || !grid[0] || !grid[1] || !grid[2]) return status;
  if (driver().status.code != Code::kOk) return driver().status;

  const CurrentContext context(image, device);
  if (context.status.code != Code::kOk) return context.status;
  CUfunction function = nullptr;
  status = load_function(image, device, &function);
  if (status.code != Code::kOk) return status;
  Parameters parameters;
  status = fill_parameters(image, call, integers, parameters);
  if (status.code != Code::kOk) return status;

  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config = {};
  if (image.pdl) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (image.cluster[0] * image.cluster[1] * image.cluster[2] > 1) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[config.numAttrs++].value.clusterDim = {image.cluster[0], image.cluster[1], image.cluster[2]};
  }
  config.gridDimX = static_cast<unsigned>(grid[0]);
  config.gridDimY = static_cast<unsigned>(grid[1]);
  config.gridDimZ = static_cast<unsigned>(grid[2]);
  config.blockDimX = image.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = image.shared_bytes;
  config.hStream = static_cast<CUstream>(call.stream);
  config.attrs = attributes;
  const CUresult code = driver().launch(&config, function, parameters.pointers, nullptr);
  return code == CUDA_SUCCESS ? Status() : driver_failure(image, "cannot be launched", code);
}

}  // namespace

// The driver may be gone, or the context destroyed: then it has no modules any more.
LoadedFunctions::~LoadedFunctions() {
  for (int device = 0; device < kMaxDevices; ++device) {
    CUcontext popped;
    if (!modules[device] || driver().push(primary.of[device]) != CUDA_SUCCESS) continue;
    const RelaxedCapture relaxed;
    driver().unload(static_cast<CUmodule>(modules[device]));
    driver().pop(&popped);
  }
}

const Image* find_image(const Image* images, size_t count, const char* name) {
  for (size_t i = 0; i < count; ++i)
    if (!std::strcmp(images[i].name, name)) return &images[i];
  return nullptr;
}

Status no_such_image(const char* name) {
  return failure(Code::kNoImage,
                 "launch_image: there is no image %s; expected one that was packaged with the graph; package the program "
                 "again", name);
}

Status launch(const Image& image, const Call& call) {
  Status status = check_counts(image, call);
  if (status.code != Code::kOk) return status;
  const int device = call.num_tensors ? call.tensors[0].device : -1;
  status = check_device(image, device);
  if (status.code != Code::kOk) return status;
  const int64_t* integers = call.integers + 3;
  for (uint32_t i = 0; i < image.num_tensors; ++i) {
    status = check_tensor(image, image.tensors[i], call.tensors[i], call.tensors[0], call.device_type, integers);
    if (status.code != Code::kOk) return status;
    integers += 2 * image.tensors[i].rank;
  }
  return launch_checked(image, call, device, integers);
}

Status launch_prepared(const Image& image, const Call& call, int device) {
  const Status status = check_device(image, device);
  return status.code == Code::kOk ? launch_checked(image, call, device, call.integers + 3) : status;
}

Status load(const Image& image, int device) {
  Status status = check_device(image, device);
  if (status.code != Code::kOk) return status;
  if (driver().status.code != Code::kOk) return driver().status;
  const CurrentContext context(image, device);
  CUfunction function = nullptr;
  return context.status.code != Code::kOk ? context.status : load_function(image, device, &function);
}

void use_driver(const char* path) {
  for (std::atomic<CUcontext>& context : primary.of) context = nullptr;
  used_driver.store(new Driver(path), std::memory_order_release);
}

int current_device() {
  CUdevice device = -1;
  const Driver& d = driver();
  return d.status.code == Code::kOk && d.device(&device) == CUDA_SUCCESS ? device : -1;
}

bool is_capturing(void* stream) {
  int status = CU_STREAM_CAPTURE_STATUS_NONE;
  const Driver& d = driver();
  if (d.status.code == Code::kOk) d.is_capturing(static_cast<CUstream>(stream), &status);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace attn_ops
