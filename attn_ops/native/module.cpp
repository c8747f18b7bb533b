// attn_ops.native._C: the launcher for eager calls. An Image is a loaded kernel, a PreparedCall the launches of a call,
// ready for other tensors, and a CallCache finds the prepared call of a call by its key, without the interpreter.
// _C.pyi documents them; attn_ops/eager inserts and evicts. Python's limited API: one build serves every version from 3.10.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "launcher.h"

namespace attn_ops {
namespace {

PyTypeObject *tensor_type, *parameter_type, *image_type, *prepared_call_type, *call_cache_type;
const DLPackExchange* exchange;

struct PythonError {};  // Python has the error

class Ref {  // owns a reference
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {
    if (!owned) throw PythonError();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept { return std::swap(object_, other.object_), *this; }
  ~Ref() { Py_XDECREF(object_); }
  static Ref of(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

void require(bool holds) {
  if (!holds) throw PythonError();
}

[[noreturn]] void raise(PyObject* type, const char* text) {
  PyErr_SetString(type, text);
  throw PythonError();
}

void require(const Status& status) {
  if (status.code != Code::kOk) raise(PyExc_RuntimeError, status.text);
}

template <class F>
PyObject* or_null(F function) {
  try {
    return function();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// ---- Python objects over C++ objects ------------------------------------------------------------------------------

template <class T>
struct Object {
  PyObject_HEAD T* value;
};

template <class T>
T& value_of(PyObject* object) {
  return *reinterpret_cast<Object<T>*>(object)->value;
}

template <class T>
PyObject* wrap(PyTypeObject* type, std::unique_ptr<T> value) {
  Ref object(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
  reinterpret_cast<Object<T>*>(object.get())->value = value.release();
  return object.release();
}

template <class T>
void dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<Object<T>*>(object)->value;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

template <class F>
void for_each(PyObject* tuple, F function) {
  for (Py_ssize_t i = 0, size = PyTuple_Size(tuple); i < size; ++i) function(PyTuple_GetItem(tuple, i));
  require(!PyErr_Occurred());
}

// ---- Image --------------------------------------------------------------------------------------------------------

struct OwnedImage {
  Ref arguments;  // own the text and the cubin
  std::vector<MapSpec> maps;
  std::vector<Parameter> parameters;
  LoadedFunctions* loaded = new LoadedFunctions{};  // never deleted: CUDA graphs may launch what is loaded
  Image image{};
};

MapSpec map_of(PyObject* row) {
  MapSpec map = {};
  PyObject* box;
  require(PyArg_ParseTuple(row, "bbbbO!", &map.tensor, &map.type, &map.swizzle, &map.element_bytes, &PyTuple_Type, &box));
  for_each(box, [&](PyObject* size) {
    if (map.rank == kMaxRank) raise(PyExc_ValueError, "a tensor map has more than five dimensions");
    map.box[map.rank++] = static_cast<uint32_t>(PyLong_AsUnsignedLong(size));
  });
  return map;
}

Parameter parameter_of(PyObject* row) {
  int kind, index;
  Parameter parameter = {};
  require(PyArg_ParseTuple(row, "iis", &kind, &index, &parameter.name));
  parameter.kind = static_cast<Kind>(kind), parameter.index = static_cast<uint8_t>(index);
  return parameter;
}

PyObject* new_image(PyTypeObject* type, PyObject* args, PyObject*) {
  return or_null([&] {
    auto made = std::make_unique<OwnedImage>();
    Image& image = made->image;
    const char* cubin;
    Py_ssize_t bytes;
    int pdl;
    PyObject *maps, *parameters;
    require(PyArg_ParseTuple(args, "ssy#iIIp(III)O!O!", &image.name, &image.function, &cubin, &bytes,
                             &image.compute_capability, &image.threads, &image.shared_bytes, &pdl, &image.cluster[0],
                             &image.cluster[1], &image.cluster[2], &PyTuple_Type, &maps, &PyTuple_Type, &parameters));
    for_each(maps, [&](PyObject* row) { made->maps.push_back(map_of(row)); });
    for_each(parameters, [&](PyObject* row) { made->parameters.push_back(parameter_of(row)); });
    if (made->maps.size() > kMaxMaps || made->parameters.size() > kMaxParameters)
      raise(PyExc_ValueError, "a kernel has more than 8 tensor maps or 128 parameters");
    image.cubin = reinterpret_cast<const unsigned char*>(cubin), image.pdl = pdl, image.loaded = made->loaded;
    image.maps = made->maps.data(), image.num_maps = static_cast<uint32_t>(made->maps.size());
    image.parameters = made->parameters.data();
    image.num_parameters = static_cast<uint32_t>(made->parameters.size());
    made->arguments = Ref::of(args);
    return wrap(type, std::move(made));
  });
}

PyObject* load_image(PyObject* self, PyObject* device) {
  return or_null([&] {
    const long index = PyLong_AsLong(device);
    require(!PyErr_Occurred());
    require(load(value_of<OwnedImage>(self).image, static_cast<int>(index)));
    return Py_NewRef(Py_None);
  });
}

// ---- PreparedCall -------------------------------------------------------------------------------------------------

constexpr size_t kMaxAddresses = 128, kMaxTensors = 64;

struct Launch {
  const Image* image;
  std::vector<uint8_t> tensors;  // of the addresses of the call
  std::vector<int64_t> integers;
  std::vector<double> floats;
};

struct Source {  // of an input: bytes from the start of an argument
  size_t argument;
  uint64_t offset;
};

// A call's addresses are those of the inputs, of the outputs, and constants.
struct PreparedCall {
  Ref launch_rows, outputs;  // the rows own the images
  std::vector<Launch> launches;
  std::vector<Source> inputs;
  std::vector<uint64_t> constants;
  Py_ssize_t num_outputs = 0;
  bool unpack = false, writes_arguments = false;
};

Launch launch_of(PyObject* row, size_t num_addresses) {
  PyObject *image, *tensors, *integers, *floats;
  require(PyArg_ParseTuple(row, "O!O!O!O!", image_type, &image, &PyTuple_Type, &tensors, &PyTuple_Type, &integers,
                           &PyTuple_Type, &floats));
  Launch launch = {&value_of<OwnedImage>(image).image, {}, {}, {}};
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

PyObject* new_prepared_call(PyTypeObject* type, PyObject* args, PyObject*) {
  return or_null([&] {
    auto call = std::make_unique<PreparedCall>();
    PyObject *launches, *inputs, *constants, *outputs;
    int unpack;
    require(PyArg_ParseTuple(args, "O!O!O!O!p", &PyTuple_Type, &launches, &PyTuple_Type, &inputs, &PyTuple_Type,
                             &constants, &PyTuple_Type, &outputs, &unpack));
    for_each(inputs, [&](PyObject* row) {
      Py_ssize_t argument;
      long long offset;
      require(PyArg_ParseTuple(row, "nL", &argument, &offset));
      call->inputs.push_back({static_cast<size_t>(argument), static_cast<uint64_t>(offset)});
      if (call->inputs.back().argument >= kMaxTensors) raise(PyExc_IndexError, "an input is of no argument");
    });
    for_each(constants, [&](PyObject* x) { call->constants.push_back(PyLong_AsUnsignedLongLong(x)); });
    for_each(outputs, [&](PyObject* x) {
      call->writes_arguments |= PyLong_Check(x);
      if (PyLong_Check(x) && PyLong_AsSize_t(x) >= kMaxTensors) raise(PyExc_IndexError, "an output is no argument");
    });
    call->num_outputs = PyTuple_Size(outputs), call->unpack = unpack;
    const size_t count = call->inputs.size() + static_cast<size_t>(call->num_outputs) + call->constants.size();
    if (count > kMaxAddresses) raise(PyExc_ValueError, "a call has more than 128 tensors");
    for_each(launches, [&](PyObject* row) { call->launches.push_back(launch_of(row, count)); });
    call->launch_rows = Ref::of(launches), call->outputs = Ref::of(outputs);
    return wrap(type, std::move(call));
  });
}

uint64_t address_of(PyObject* tensor) {
  DLTensor t;
  require(!exchange->view(tensor, &t));
  return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
}

// An output is an argument, a tensor without elements that every call returns, or a function that allocates it.
Ref make_output(PyObject* output, PyObject* const* arguments) {
  if (PyLong_Check(output)) return Ref::of(arguments[PyLong_AsSsize_t(output)]);
  return PyObject_TypeCheck(output, tensor_type) ? Ref::of(output) : Ref(PyObject_CallNoArgs(output));
}

Status launch_all(const PreparedCall& call, const uint64_t* addresses, int device, void* stream) {
  TensorView tensors[kMaxTensors];
  Status status;
  for (const Launch& launch : call.launches) {
    for (size_t i = 0; i < launch.tensors.size(); ++i)
      tensors[i].address = reinterpret_cast<void*>(addresses[launch.tensors[i]]);
    const Call now = {tensors, launch.tensors.size(), launch.integers.data(), launch.integers.size(),
                      launch.floats.data(), launch.floats.size(), 0, stream};
    status = launch_prepared(*launch.image, now, device);
    if (status.code != Code::kOk) break;
  }
  return status;
}

// Everything of a call is on the stack: threads share nothing that is written.
PyObject* replay(const PreparedCall& call, int device, void* stream, const uint64_t* given, PyObject* const* arguments) {
  uint64_t addresses[kMaxAddresses], *next = addresses;
  for (const Source& s : call.inputs) *next++ = given[s.argument] + s.offset;
  Ref made(PyTuple_New(call.num_outputs));
  for (Py_ssize_t i = 0; i < call.num_outputs; ++i) {
    Ref output = make_output(PyTuple_GetItem(call.outputs.get(), i), arguments);
    *next++ = address_of(output.get());
    require(!PyTuple_SetItem(made.get(), i, output.release()));
  }
  for (const uint64_t constant : call.constants) *next++ = constant;
  PyThreadState* thread = PyEval_SaveThread();
  const Status status = launch_all(call, addresses, device, stream);
  PyEval_RestoreThread(thread);
  require(status);
  if (!call.unpack) return made.release();
  return Py_NewRef(call.num_outputs ? PyTuple_GetItem(made.get(), 0) : Py_None);
}

PyObject* launch_now(PyObject* self, PyObject* args) {
  return or_null([&] {
    const PreparedCall& call = value_of<PreparedCall>(self);
    int device;
    unsigned long long stream;
    require(PyArg_ParseTuple(args, "iK", &device, &stream));
    if (!call.inputs.empty() || call.writes_arguments) raise(PyExc_TypeError, "the call has arguments");
    return replay(call, device, reinterpret_cast<void*>(stream), nullptr, nullptr);
  });
}

// ---- CallCache ----------------------------------------------------------------------------------------------------

struct CallCache {
  Ref entries, grad_mode, on_miss, interposition_checks;
  bool of_method = false;  // the first argument is the owner of the cache, and no part of the key
};

enum class Argument : uint64_t { kOption, kList, kTuple, kTensor };
constexpr size_t kMaxWords = 384, kMaxOptions = 2 * kMaxTensors;

// The arguments and the context of a call. The words, and the options as Python objects, are its key.
struct Arguments {
  uint64_t words[kMaxWords], addresses[kMaxTensors], ends[kMaxTensors];
  PyObject *tensors[kMaxTensors], *options[kMaxOptions];  // borrowed
  size_t num_words = 0, num_tensors = 0, num_options = 0;
  void* stream = nullptr;
  int device = -1;
  bool grad_mode = false;

  // Each adds to the key and returns whether the call can be cached so far; if not, an error may be set.

  bool add_word(uint64_t word) { return num_words < kMaxWords && (words[num_words++] = word, true); }

  bool add_option(PyObject* x) {
    if (num_options == kMaxOptions) return false;
    options[num_options++] = x;
    return add_word(static_cast<uint64_t>(Argument::kOption)) && add_word(reinterpret_cast<uintptr_t>(Py_TYPE(x)));
  }

  // A list is a plan: the identity of its tensors is part of the key, so that launches may contain their addresses.
  bool add_list(PyObject* list) {
    const Py_ssize_t size = PyList_Size(list);
    bool fits = add_word(static_cast<uint64_t>(Argument::kList) | static_cast<uint64_t>(size) << 8);
    for (Py_ssize_t i = 0; fits && i < size; ++i) fits = add_word(reinterpret_cast<uintptr_t>(PyList_GetItem(list, i)));
    return fits;
  }

  bool add_tensor(PyObject* tensor) {
    DLTensor t;
    if (num_tensors == kMaxTensors || exchange->view(tensor, &t) || (!t.strides && t.ndim)) return false;
    uint64_t requires_grad = 0, elements = 1;
    bool empty = false;
    for (int d = 0; d < t.ndim; ++d) {
      elements += static_cast<uint64_t>((t.shape[d] - 1) * t.strides[d]);
      empty |= t.shape[d] == 0;
    }
    const uint64_t address = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
    tensors[num_tensors] = tensor;
    ends[num_tensors] = address + (empty ? 0 : elements * t.dtype.bits / 8);
    addresses[num_tensors++] = address;
    if (grad_mode) {
      PyObject* attribute = PyObject_GetAttrString(tensor, "requires_grad");
      if (!attribute) return false;
      requires_grad = attribute == Py_True;
      Py_DECREF(attribute);
    }
    const uint64_t alignment = address & 15;  // kernels are compiled for multiples of 16 bytes
    bool fits = add_word(static_cast<uint64_t>(Argument::kTensor) | static_cast<uint64_t>(t.ndim) << 8 |
                         static_cast<uint64_t>(t.dtype.code) << 16 | static_cast<uint64_t>(t.dtype.bits) << 24 |
                         alignment << 32 | requires_grad << 36 | static_cast<uint64_t>(t.device.type) << 40) &&
                add_word(static_cast<uint64_t>(t.device.id));
    for (int d = 0; fits && d < t.ndim; ++d)
      fits = add_word(static_cast<uint64_t>(t.shape[d])) && add_word(static_cast<uint64_t>(t.strides[d]));
    return fits;
  }

  bool add(PyObject* x, bool of_method) {
    if (Py_TYPE(x) == tensor_type || Py_TYPE(x) == parameter_type) return add_tensor(x);
    if (PyObject_TypeCheck(x, tensor_type)) return false;  // a subclass may override what the op does
    if (PyList_Check(x)) return !of_method && add_list(x);
    if (!PyTuple_Check(x)) return add_option(x);
    const Py_ssize_t size = PyTuple_Size(x);
    bool fits = add_word(static_cast<uint64_t>(Argument::kTuple) | static_cast<uint64_t>(size) << 8);
    for (Py_ssize_t i = 0; fits && i < size; ++i) fits = add(PyTuple_GetItem(x, i), of_method);
    return fits;
  }

  bool add_context(PyObject* grad_mode_function) {
    PyObject* mode = PyObject_CallNoArgs(grad_mode_function);
    if (!mode) return false;
    grad_mode = mode == Py_True;
    Py_DECREF(mode);
    device = current_device();
    if (device < 0 || exchange->current_stream(kDLCUDA, device, &stream)) return false;
    return add_word(static_cast<uint64_t>(device)) &&
           add_word(static_cast<uint64_t>(grad_mode) << 1 | static_cast<uint64_t>(is_capturing(stream)));
  }

  PyObject* key() const {
    Ref bytes(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words),
                                        static_cast<Py_ssize_t>(num_words * sizeof *words)));
    if (!num_options) return bytes.release();
    Ref made(PyTuple_New(static_cast<Py_ssize_t>(1 + num_options)));
    PyTuple_SetItem(made.get(), 0, bytes.release());
    for (size_t i = 0; i < num_options; ++i)
      PyTuple_SetItem(made.get(), static_cast<Py_ssize_t>(1 + i), Py_NewRef(options[i]));
    return made.release();
  }
};

bool is_interposed(const CallCache& cache) {
  bool interposed = false;
  for_each(cache.interposition_checks.get(), [&](PyObject* check) {
    if (!interposed) interposed = PyObject_IsTrue(Ref(PyObject_CallNoArgs(check)).get()) != 0;
  });
  return interposed;
}

bool add_call(const CallCache& cache, Arguments& call, PyObject* args, PyObject* kwargs) {
  if (is_interposed(cache) || !call.add_context(cache.grad_mode.get())) return false;
  for (Py_ssize_t i = cache.of_method, size = PyTuple_Size(args); i < size; ++i)
    if (!call.add(PyTuple_GetItem(args, i), cache.of_method)) return false;
  PyObject *name, *x;
  for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name, &x);)
    if (!call.add_option(name) || !call.add(x, cache.of_method)) return false;
  return true;
}

// The entry of a call, or null; and its key, or null if the call cannot be cached.
PyObject* find(const CallCache& cache, Arguments& call, PyObject* args, PyObject* kwargs, Ref& key) {
  PyObject* entry = nullptr;
  try {
    if (add_call(cache, call, args, kwargs)) {
      key = Ref(call.key());
      entry = PyDict_GetItemWithError(cache.entries.get(), key.get());
    }
  } catch (const PythonError&) {
  }
  if (PyErr_Occurred()) {  // also of an option that is not hashable
    PyErr_Clear();
    key = Ref();
  }
  return entry;
}

// Whether an argument that an output is written to overlaps another argument in memory.
bool output_overlaps(const PreparedCall& prepared, const Arguments& call) {
  for (Py_ssize_t i = 0; prepared.writes_arguments && i < prepared.num_outputs; ++i) {
    PyObject* output = PyTuple_GetItem(prepared.outputs.get(), i);
    if (!PyLong_Check(output)) continue;
    const size_t o = PyLong_AsSize_t(output);
    for (size_t j = 0; j < call.num_tensors; ++j)
      if (j != o && call.addresses[j] < call.ends[o] && call.addresses[o] < call.ends[j]) return true;
  }
  return false;
}

PyObject* call_cached(PyObject* self, PyObject* args, PyObject* kwargs) {
  return or_null([&]() -> PyObject* {
    const CallCache& cache = value_of<CallCache>(self);
    Arguments call;
    Ref key;
    const Ref entry = Ref::of(find(cache, call, args, kwargs, key) ?: Py_None);
    if (PyObject_TypeCheck(entry.get(), prepared_call_type)) {
      const PreparedCall& prepared = value_of<PreparedCall>(entry.get());
      if (!output_overlaps(prepared, call)) return replay(prepared, call.device, call.stream, call.addresses, call.tensors);
      key = Ref();
    } else if (entry.get() != Py_None) {
      return PyObject_Call(entry.get(), args, kwargs);
    }
    const Ref named = kwargs ? Ref::of(kwargs) : Ref(PyDict_New());
    PyObject* given = key.get() ? key.get() : Py_None;
    return PyObject_CallFunctionObjArgs(cache.on_miss.get(), given, args, named.get(), nullptr);
  });
}

PyObject* new_call_cache(PyTypeObject* type, PyObject* args, PyObject*) {
  return or_null([&] {
    PyObject *entries, *grad_mode, *on_miss, *checks;
    int of_method;
    require(PyArg_ParseTuple(args, "O!OOO!p", &PyDict_Type, &entries, &grad_mode, &on_miss, &PyTuple_Type, &checks,
                             &of_method));
    auto cache = std::make_unique<CallCache>();
    cache->of_method = of_method;
    cache->entries = Ref::of(entries), cache->grad_mode = Ref::of(grad_mode);
    cache->on_miss = Ref::of(on_miss), cache->interposition_checks = Ref::of(checks);
    return wrap(type, std::move(cache));
  });
}

// ---- The module ---------------------------------------------------------------------------------------------------

PyMethodDef image_methods[] = {{"load", load_image, METH_O, nullptr}, {}};
PyType_Slot image_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_image)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<OwnedImage>)},
    {Py_tp_methods, image_methods},
    {},
};

PyMethodDef prepared_call_methods[] = {
    {"launch", launch_now, METH_VARARGS, nullptr}, {}};
PyType_Slot prepared_call_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_prepared_call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<PreparedCall>)},
    {Py_tp_methods, prepared_call_methods},
    {},
};

PyType_Slot call_cache_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_call_cache)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<CallCache>)},
    {Py_tp_call, reinterpret_cast<void*>(call_cached)},
    {},
};

PyObject* connect(PyObject*, PyObject* path) {
  const char* name = PyUnicode_AsUTF8AndSize(path, nullptr);
  if (!name) return nullptr;
  use_driver(name);
  return Py_NewRef(Py_None);
}
PyMethodDef functions[] = {
    {"connect", connect, METH_O, nullptr},
    {},
};

template <class T>
PyTypeObject* add_type(PyObject* module, const char* name, PyType_Slot* slots) {
  PyType_Spec spec = {name, sizeof(Object<T>), 0, Py_TPFLAGS_DEFAULT, slots};
  Ref type(PyType_FromSpec(&spec));
  require(!PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type.get())));
  return reinterpret_cast<PyTypeObject*>(type.release());
}

void read_torch() {
  const Ref torch(PyImport_ImportModule("torch"));
  tensor_type = reinterpret_cast<PyTypeObject*>(Ref(PyObject_GetAttrString(torch.get(), "Tensor")).release());
  const Ref nn(PyObject_GetAttrString(torch.get(), "nn"));
  parameter_type = reinterpret_cast<PyTypeObject*>(Ref(PyObject_GetAttrString(nn.get(), "Parameter")).release());
  const Ref capsule(PyObject_GetAttrString(reinterpret_cast<PyObject*>(tensor_type), "__dlpack_c_exchange_api__"));
  exchange = static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  require(exchange != nullptr);
  if (exchange->major != kDLPackMajor || !exchange->view)
    raise(PyExc_ImportError, "torch has another version of DLPack than 1");
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace attn_ops

PyMODINIT_FUNC PyInit__C() {
  using namespace attn_ops;
  return or_null([] {
    read_torch();
    Ref module(PyModule_Create(&definition));
    image_type = add_type<OwnedImage>(module.get(), "attn_ops.native._C.Image", image_slots);
    prepared_call_type = add_type<PreparedCall>(module.get(), "attn_ops.native._C.PreparedCall", prepared_call_slots);
    call_cache_type = add_type<CallCache>(module.get(), "attn_ops.native._C.CallCache", call_cache_slots);
    return module.release();
  });
}
