// How torch hands tensors to C code without calls of Python: the DLPack C exchange API, version 1, declared by its ABI.
// torch.Tensor has the table of functions in the capsule `__dlpack_c_exchange_api__`.
#pragma once

#include <cstdint>

constexpr uint32_t kDLPackMajor = 1;
constexpr int32_t kDLCPU = 1, kDLCUDA = 2;
constexpr uint8_t kDLFloat = 2, kDLBfloat = 4;

struct DLTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLPackExchange {
  uint32_t major, minor;
  void* older;
  void *allocate, *from_python, *to_python;
  int (*view)(void* tensor, DLTensor* out);  // valid until control returns to torch; no synchronization
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
};
