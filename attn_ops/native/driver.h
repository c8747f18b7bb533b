// What the launcher uses of the CUDA driver API, declared by its ABI, so that the launcher compiles where no CUDA
// headers are installed. The names are NVIDIA's; tests/native/test_driver_header.py compares the values with cuda.h.
#pragma once

#include <cstdint>

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, CU_FUNC_CACHE_PREFER_SHARED = 1;
constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2, CU_STREAM_CAPTURE_STATUS_NONE = 0;
constexpr int CU_TENSOR_MAP_INTERLEAVE_NONE = 0, CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2;
constexpr int CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0;

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};

struct CUlaunchAttribute {
  int id;
  union alignas(8) {
    char pad[64];
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

static_assert(sizeof(CUtensorMap) == 128 && sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56,
              "as in cuda.h");

extern "C" {
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorString(CUresult code, const char** text);
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext* context);
CUresult cuThreadExchangeStreamCaptureMode(int* mode);
CUresult cuStreamIsCapturing(CUstream stream, int* status);
CUresult cuModuleLoadData(CUmodule* module, const void* image);
CUresult cuModuleUnload(CUmodule module);
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name);
CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value);
CUresult cuFuncSetCacheConfig(CUfunction function, int config);
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                int interleave, int swizzle, int l2_promotion, int out_of_bounds_fill);
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra);
}
