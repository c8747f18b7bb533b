// The op attn::launch_image as a package calls it. Of torch only the C ABI of shim.h.
#include "launcher.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <vector>

#ifdef ATTN_OPS_CPU  // tests without a GPU, over a fake driver
#define ATTN_OPS_ENTRY aoti_torch_cpu_launch_image
#else
#define ATTN_OPS_ENTRY aoti_torch_cuda_launch_image
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace attn_ops {

extern const Image package_images[];
extern const size_t num_package_images;

namespace {

// The generated code that calls the shim throws at an error code, without a text. Throwing here keeps the text.
void require(const Status& status) {
  if (status.code != Code::kOk) throw std::runtime_error(status.text);
}

void require(AOTITorchError error) {
  if (error)
    throw std::runtime_error(
        "launch_image: a tensor or its stream cannot be read; expected a tensor of torch; pass a tensor that torch made");
}

TensorView view_of(AtenTensorHandle handle) {
  TensorView t = {};
  int64_t *sizes = nullptr, *strides = nullptr;
  require(aoti_torch_get_data_ptr(handle, &t.address) | aoti_torch_get_sizes(handle, &sizes) |
          aoti_torch_get_strides(handle, &strides) | aoti_torch_get_dim(handle, &t.rank) |
          aoti_torch_get_dtype(handle, &t.dtype) | aoti_torch_get_device_type(handle, &t.device_type) |
          aoti_torch_get_device_index(handle, &t.device));
  t.sizes = sizes, t.strides = strides;
  return t;
}

}  // namespace
}  // namespace attn_ops

extern "C" __attribute__((visibility("hidden"))) AOTITorchError ATTN_OPS_ENTRY(
    const AtenTensorHandle* outs, int64_t num_outs, const AtenTensorHandle* ins, int64_t num_ins,
    const int64_t* integers, int64_t num_integers, const double* floats, int64_t num_floats, const char* name, void*) {
  using namespace attn_ops;
  const Image* image = find_image(package_images, num_package_images, name);
  if (!image) require(no_such_image(name));
  std::vector<TensorView> tensors;
  tensors.reserve(static_cast<size_t>(num_outs + num_ins));
  for (int64_t i = 0; i < num_outs; ++i) tensors.push_back(view_of(outs[i]));
  for (int64_t i = 0; i < num_ins; ++i) tensors.push_back(view_of(ins[i]));
  Call call = {tensors.data(), tensors.size(), integers, static_cast<size_t>(num_integers),
               floats, static_cast<size_t>(num_floats), 0, nullptr};
#ifdef ATTN_OPS_CPU
  call.device_type = aoti_torch_device_type_cpu();
  for (TensorView& t : tensors) t.device = 0;
#else
  call.device_type = aoti_torch_device_type_cuda();
  if (!tensors.empty() && tensors[0].device_type == call.device_type)
    require(aoti_torch_get_current_cuda_stream(tensors[0].device, &call.stream));
#endif
  require(launch(*image, call));
  return AOTI_TORCH_SUCCESS;
}
