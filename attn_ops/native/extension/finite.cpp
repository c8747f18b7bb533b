#include <cmath>

#include "extension.h"

namespace attn_ops {
namespace {

// The memory of a tensor on the CPU, all of which its elements fill; null with a size of 0 if that is not certain.
struct Elements {
  const void* data = nullptr;
  int64_t size = 0;
  int code = 0, bits = 0;
};

Elements elements_of(PyObject* tensor) {
  DLTensor t;
  if (!PyObject_TypeCheck(tensor, torch.tensor) || torch.exchange->view(tensor, &t)) return PyErr_Clear(), Elements();
  if (t.device.type != kDLCPU || (t.ndim && !t.strides)) return {};
  int64_t size = 1, last = 0;
  for (int d = 0; d < t.ndim; ++d) size *= t.shape[d], last += (t.shape[d] - 1) * t.strides[d];
  if (size != last + 1) return {};
  return {static_cast<const char*>(t.data) + t.byte_offset, size, t.dtype.code, t.dtype.bits};
}

template <class Bits>
bool all_finite(const Elements& t, Bits exponent) {
  const Bits* x = static_cast<const Bits*>(t.data);
  bool finite = true;
  for (int64_t i = 0; i < t.size; ++i) finite &= (x[i] & exponent) != exponent;
  return finite;
}

bool below_infinity_and_not_zero(const Elements& t) {
  const float* x = static_cast<const float*>(t.data);
  bool holds = true;
  for (int64_t i = 0; i < t.size; ++i) holds &= x[i] < INFINITY && x[i] != 0;
  return holds;
}

}  // namespace

PyObject* is_regular(PyObject*, PyObject* args) {
  return or_null([&] {
    PyObject *out, *lse;
    require(PyArg_ParseTuple(args, "OO", &out, &lse));
    const Elements o = elements_of(out), l = elements_of(lse);
    const bool is_float = o.code == kDLFloat && o.bits == 32, is_bfloat = o.code == kDLBfloat;
    if (!o.size || !(is_float || is_bfloat) || l.code != kDLFloat || l.bits != 32) return Py_NewRef(Py_None);
    const bool finite = is_float ? all_finite<uint32_t>(o, 0x7f800000) : all_finite<uint16_t>(o, 0x7f80);
    return PyBool_FromLong(finite && below_infinity_and_not_zero(l));
  });
}

}  // namespace attn_ops
