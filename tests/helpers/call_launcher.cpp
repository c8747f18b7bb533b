// The launcher of attn_ops/native as tests call it by ctypes.
#include "launcher.h"

#include <cstring>

namespace attn_ops {
extern const Image package_images[];
extern const size_t num_package_images;
}  // namespace attn_ops

struct TestCall {
  const char* image;
  const attn_ops::TensorView* tensors;
  size_t num_tensors;
  const int64_t* integers;
  size_t num_integers;
  const double* floats;
  size_t num_floats;
  void* stream;
};

extern "C" __attribute__((visibility("default"))) int call_launcher(const TestCall* c, char* text) {
  using namespace attn_ops;
  const Image* image = find_image(package_images, num_package_images, c->image);
  const Call call = {c->tensors, c->num_tensors, c->integers, c->num_integers, c->floats, c->num_floats, 1, c->stream};
  const Status status = image ? launch(*image, call) : no_such_image(c->image);
  std::strcpy(text, status.text.c_str());
  return static_cast<int>(status.code);
}
