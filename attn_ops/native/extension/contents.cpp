#include <algorithm>
#include <cstring>

#include "extension.h"

namespace attn_ops {
namespace {

struct Bytes {
  const char* data;
  size_t size, element;
};

// The memory of a contiguous tensor on the CPU. No memory, with elements of 0 bytes, if it is another.
Bytes bytes_of(PyObject* tensor) {
  DLTensor t;
  if (!PyObject_TypeCheck(tensor, torch.tensor) || torch.exchange->view(tensor, &t)) return PyErr_Clear(), Bytes{};
  if (t.device.type != kDLCPU || (t.ndim && !t.strides)) return {};
  int64_t size = 1;
  for (int d = t.ndim - 1; d >= 0; size *= t.shape[d--])
    if (t.shape[d] != 1 && t.strides[d] != size) return {};
  const size_t element = t.dtype.bits / 8;
  return {static_cast<const char*>(t.data) + t.byte_offset, static_cast<size_t>(size) * element, element};
}

}  // namespace

PyObject* contents(PyObject*, PyObject* args) {
  return or_null([&] {
    PyObject* tensors;
    Py_ssize_t most;
    int of_table = false;
    require(PyArg_ParseTuple(args, "O!n|p", &PyTuple_Type, &tensors, &most, &of_table));
    std::vector<Bytes> parts;
    for_each(tensors, [&](PyObject* t) { parts.push_back(bytes_of(t)); });
    for (const Bytes& part : parts)
      if (!part.element) return Py_NewRef(Py_None);
    if (of_table && parts.size() > 1) {
      const Bytes& indptr = parts.front();
      Bytes& indices = parts.back();
      int32_t used = 0;
      if (indptr.element != sizeof used || indices.element != sizeof used) return Py_NewRef(Py_None);
      if (indptr.size) std::memcpy(&used, indptr.data + indptr.size - sizeof used, sizeof used);
      if (used > 0) indices.size = std::min(indices.size, used * sizeof used);
    }
    size_t size = 0;
    for (const Bytes& part : parts) size += part.size;
    if (size > static_cast<size_t>(most)) return Py_NewRef(Py_None);
    Ref found(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char* at = PyBytes_AsString(found.get());
    for (const Bytes& part : parts)
      if (part.size) std::memcpy(at, part.data, part.size), at += part.size;
    return found.release();
  });
}

}  // namespace attn_ops
