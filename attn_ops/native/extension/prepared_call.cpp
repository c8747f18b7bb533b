#include "extension.h"

namespace attn_ops {
namespace {

constexpr size_t kMaxAddresses = 128;
constexpr Py_ssize_t kConstant = -1;

PreparedLaunch launch_of(PyObject* row, size_t num_addresses) {
  PyObject *image, *tensors, *integers, *floats;
  require(PyArg_ParseTuple(row, "O!O!O!O!", image_type, &image, &PyTuple_Type, &tensors, &PyTuple_Type, &integers,
                           &PyTuple_Type, &floats));
  PreparedLaunch launch = {&value_of<EagerImage>(image).image, {}, {}, {}};
  for_each(tensors, [&](PyObject* x) {
    const size_t index = PyLong_AsSize_t(x);
    if (index >= num_addresses) raise(PyExc_IndexError, "a launch takes a tensor that the call does not have");
    launch.tensors.push_back(static_cast<uint8_t>(index));
  });
  for_each(integers, [&](PyObject* x) { launch.integers.push_back(PyLong_AsLongLong(x)); });
  for_each(floats, [&](PyObject* x) { launch.floats.push_back(PyFloat_AsDouble(x)); });
  if (launch.tensors.size() > kMaxTensors || launch.integers.size() < 3)
    raise(PyExc_ValueError, "a launch takes at most 64 tensors, and three integers for its grid");
  return launch;
}

std::unique_ptr<PreparedCall> make_prepared_call(PyObject* args) {
  auto call = std::make_unique<PreparedCall>();
  PyObject *launches, *sources, *outputs;
  const Ref none(PyTuple_New(0));
  PyObject* scratch = none.get();
  int unpack;
  require(PyArg_ParseTuple(args, "O!O!O!p|O!", &PyTuple_Type, &launches, &PyTuple_Type, &sources, &PyTuple_Type, &outputs,
                           &unpack, &PyTuple_Type, &scratch));
  for_each(sources, [&](PyObject* row) {
    Py_ssize_t argument;
    unsigned long long offset;
    require(PyArg_ParseTuple(row, "nK", &argument, &offset));
    if (argument < kConstant || argument >= static_cast<Py_ssize_t>(kMaxTensors))
      raise(PyExc_IndexError, "a source is no argument");
    call->sources.push_back({argument, offset});
    call->takes_arguments |= argument != kConstant;
  });
  for_each(outputs, [&](PyObject* x) {
    call->writes_arguments |= PyLong_Check(x);
    if (PyLong_Check(x) && PyLong_AsSize_t(x) >= kMaxTensors) raise(PyExc_IndexError, "an output is no argument");
  });
  call->num_outputs = PyTuple_Size(outputs), call->num_scratch = PyTuple_Size(scratch), call->unpack = unpack;
  const size_t count = call->sources.size() + static_cast<size_t>(call->num_outputs + call->num_scratch);
  if (count > kMaxAddresses) raise(PyExc_ValueError, "a call has more than 128 tensors");
  for_each(launches, [&](PyObject* row) { call->launches.push_back(launch_of(row, count)); });
  call->launch_rows = Ref::of(launches), call->outputs = Ref::of(outputs), call->scratch = Ref::of(scratch);
  return call;
}

// An output is an argument, a tensor without elements that every call returns, or a function that allocates it.
Ref make_output(PyObject* output, PyObject* const* arguments) {
  if (PyLong_Check(output)) return Ref::of(arguments[PyLong_AsSsize_t(output)]);
  return PyObject_TypeCheck(output, torch.tensor) ? Ref::of(output) : Ref(PyObject_CallNoArgs(output));
}

uint64_t address_of(PyObject* tensor) {
  DLTensor t;
  require(!torch.exchange->view(tensor, &t));
  return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
}

Status launch_all(const PreparedCall& call, const uint64_t* addresses, int device, void* stream) {
  TensorView tensors[kMaxTensors];
  for (const PreparedLaunch& launch : call.launches) {
    for (size_t i = 0; i < launch.tensors.size(); ++i)
      tensors[i].address = reinterpret_cast<void*>(addresses[launch.tensors[i]]);
    const Call now = {tensors, launch.tensors.size(), launch.integers.data(), launch.integers.size(),
                      launch.floats.data(), launch.floats.size(), 0, stream};
    const Status status = launch_prepared(*launch.image, now, device);
    if (status.code != Code::kOk) return status;
  }
  return {};
}

PyObject* launch_now(PyObject* self, PyObject* args) {
  return or_null([&] {
    const PreparedCall& call = value_of<PreparedCall>(self);
    int device;
    unsigned long long stream;
    require(PyArg_ParseTuple(args, "iK", &device, &stream));
    if (call.takes_arguments || call.writes_arguments) raise(PyExc_TypeError, "the call has arguments");
    return call.launch(device, reinterpret_cast<void*>(stream), nullptr, nullptr);
  });
}

// A call on the current device and stream, whose arguments a cache has found to have the form of the first call's.
PyObject* call_with(PyObject* self, PyObject* arguments) {
  return or_null([&] {
    const PreparedCall& call = value_of<PreparedCall>(self);
    if (!PyTuple_Check(arguments) || PyTuple_Size(arguments) > static_cast<Py_ssize_t>(kMaxTensors))
      raise(PyExc_TypeError, "expected a tuple of at most 64 tensors");
    const Py_ssize_t count = PyTuple_Size(arguments);
    for (const PreparedCall::Source& s : call.sources)
      if (s.argument >= count) raise(PyExc_IndexError, "the call has more arguments");
    if (call.writes_arguments) raise(PyExc_TypeError, "the call writes to arguments");
    uint64_t addresses[kMaxTensors];
    PyObject* tensors[kMaxTensors];
    for (Py_ssize_t i = 0; i < count; ++i) {
      tensors[i] = PyTuple_GetItem(arguments, i);
      if (!PyObject_TypeCheck(tensors[i], torch.tensor)) raise(PyExc_TypeError, "expected tensors");
      addresses[i] = address_of(tensors[i]);
    }
    void* stream = nullptr;
    const int device = current_device();
    if (device < 0 || torch.exchange->current_stream(kDLCUDA, device, &stream))
      raise(PyExc_RuntimeError, "there is no current device");
    return call.launch(device, stream, addresses, tensors);
  });
}

PyMethodDef methods[] = {
    {"launch", launch_now, METH_VARARGS, nullptr}, {"call", call_with, METH_O, nullptr}, {}};

}  // namespace

// Everything of a call is on the stack: threads share nothing that is written.
PyObject* PreparedCall::launch(int device, void* stream, const uint64_t* given, PyObject* const* arguments) const {
  uint64_t addresses[kMaxAddresses], *next = addresses;
  for (const Source& s : sources) *next++ = (s.argument == kConstant ? 0 : given[s.argument]) + s.offset;
  Ref made(PyTuple_New(num_outputs));
  for (Py_ssize_t i = 0; i < num_outputs; ++i) {
    Ref output = make_output(PyTuple_GetItem(outputs.get(), i), arguments);
    *next++ = address_of(output.get());
    require(!PyTuple_SetItem(made.get(), i, output.release()));
  }
  // Freed when the call returns: the allocator gives it to later work of the stream alone.
  Ref held(PyTuple_New(num_scratch));
  for (Py_ssize_t i = 0; i < num_scratch; ++i) {
    Ref memory(PyObject_CallNoArgs(PyTuple_GetItem(scratch.get(), i)));
    *next++ = address_of(memory.get());
    require(!PyTuple_SetItem(held.get(), i, memory.release()));
  }
  require([&] {
    const WithoutGil without_gil;
    return launch_all(*this, addresses, device, stream);
  }());
  if (!unpack) return made.release();
  return Py_NewRef(num_outputs ? PyTuple_GetItem(made.get(), 0) : Py_None);
}

PyTypeObject* add_prepared_call_type(PyObject* module) {
  const char* name = "attn_ops.native._C.PreparedCall";
  return add_type<PreparedCall, make_prepared_call>(module, name, {Py_tp_methods, methods});
}

}  // namespace attn_ops
