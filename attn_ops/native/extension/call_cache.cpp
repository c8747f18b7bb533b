#include "extension.h"

namespace attn_ops {
namespace {

struct CallCache {
  Ref entries, grad_mode, on_miss, interposition_checks;
  bool of_method = false;      // calls are (number, owner, args, kwargs); the owner is no part of the key
  bool on_cuda = true;         // the key has the device and its capture, and a plan's tensors by identity, else by sizes
  bool tuple_is_plan = false;  // a tuple among the arguments is a plan, as a list is; else its tensors are arguments
  bool takes_tensors = false;  // entries take the tensors of a call, without those of lists
};

enum class Argument : uint64_t { kOption, kPlan, kTuple, kTensor };
constexpr uint64_t kAlignment = 16;  // ALIGNMENT of attn_ops/gpu.py. A key has four bits for what is beyond a multiple
constexpr size_t kMaxWords = 384, kMaxOptions = 2 * kMaxTensors;

struct NotCacheable {};

// The arguments and the context of a call. The words, and the options as Python objects, are its key.
struct Arguments {
  const CallCache& cache;
  uint64_t words[kMaxWords], addresses[kMaxTensors], ends[kMaxTensors];
  PyObject *tensors[kMaxTensors], *options[kMaxOptions];  // borrowed
  size_t num_words = 0, num_tensors = 0, num_options = 0;
  void* stream = nullptr;
  int device = -1;
  bool grad_mode = false;

  explicit Arguments(const CallCache& of) : cache(of) {}

  void add_word(uint64_t word) {
    if (num_words == kMaxWords) throw NotCacheable();
    words[num_words++] = word;
  }

  void add_size(Argument kind, Py_ssize_t size) {
    add_word(static_cast<uint64_t>(kind) | static_cast<uint64_t>(size) << 8);
  }

  void add_option(PyObject* x) {
    if (num_options == kMaxOptions) throw NotCacheable();
    options[num_options++] = x;
    add_word(static_cast<uint64_t>(Argument::kOption));
    add_word(reinterpret_cast<uintptr_t>(Py_TYPE(x)));
  }

  // On CUDA the identity of a plan's tensors is part of the key, so that launches may contain their addresses. Nothing
  // keeps the tensors of a plan given to a method or function.
  void add_plan(PyObject* plan) {
    if (cache.of_method) throw NotCacheable();
    const bool is_list = PyList_Check(plan), by_identity = cache.on_cuda && !cache.takes_tensors;
    const Py_ssize_t size = is_list ? PyList_Size(plan) : PyTuple_Size(plan);
    const size_t tensors_before = num_tensors;
    add_size(Argument::kPlan, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* x = is_list ? PyList_GetItem(plan, i) : PyTuple_GetItem(plan, i);
      // The key holds other objects than tensors: another one could get their address once they are freed.
      by_identity && PyObject_TypeCheck(x, torch.tensor) ? add_word(reinterpret_cast<uintptr_t>(x)) : add(x);
    }
    if ((cache.on_cuda || cache.takes_tensors) && num_tensors > tensors_before) throw NotCacheable();
  }

  void add_tensor(PyObject* tensor) {
    DLTensor t;
    if (num_tensors == kMaxTensors || torch.exchange->view(tensor, &t) || (!t.strides && t.ndim)) throw NotCacheable();
    const uint64_t address = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
    const uint64_t alignment = address % kAlignment;
    // Calls that pass one tensor twice have keys of their own, so that their entries may take either.
    uint64_t first = 0;
    while (first < num_tensors && tensors[first] != tensor) ++first;
    const bool requires_grad = grad_mode && Ref(PyObject_GetAttrString(tensor, "requires_grad")).get() == Py_True;
    add_word(static_cast<uint64_t>(Argument::kTensor) | static_cast<uint64_t>(t.ndim) << 8 |
             static_cast<uint64_t>(t.dtype.code) << 16 | static_cast<uint64_t>(t.dtype.bits) << 24 | alignment << 32 |
             static_cast<uint64_t>(requires_grad) << 36 | static_cast<uint64_t>(t.device.type) << 40 |
             (first < num_tensors ? first + 1 : 0) << 48);
    add_word(static_cast<uint64_t>(t.device.id));
    uint64_t elements = 1;
    bool empty = false;
    for (int d = 0; d < t.ndim; ++d) {
      add_word(static_cast<uint64_t>(t.shape[d])), add_word(static_cast<uint64_t>(t.strides[d]));
      elements += static_cast<uint64_t>((t.shape[d] - 1) * t.strides[d]);
      empty |= t.shape[d] == 0;
    }
    tensors[num_tensors] = tensor;
    ends[num_tensors] = address + (empty ? 0 : elements * t.dtype.bits / 8);
    addresses[num_tensors++] = address;
  }

  void add(PyObject* x) {
    if (Py_TYPE(x) == torch.tensor || Py_TYPE(x) == torch.parameter) return add_tensor(x);
    if (PyList_Check(x) || (cache.tuple_is_plan && PyTuple_Check(x))) return add_plan(x);
    if (PyTuple_Check(x)) return add_tuple(x);
    if (PyObject_TypeCheck(x, torch.tensor)) throw NotCacheable();  // a subclass may override what the op does
    add_option(x);
  }

  void add_tuple(PyObject* tuple) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    add_size(Argument::kTuple, size);
    for (Py_ssize_t i = 0; i < size; ++i) add(PyTuple_GetItem(tuple, i));
  }

  void add_context() {
    grad_mode = Ref(PyObject_CallNoArgs(cache.grad_mode.get())).get() == Py_True;
    add_word(grad_mode);
    if (!cache.on_cuda) return;
    device = current_device();
    if (device < 0 || torch.exchange->current_stream(kDLCUDA, device, &stream)) throw NotCacheable();
    add_word(static_cast<uint64_t>(device) << 1 | static_cast<uint64_t>(is_capturing(stream)));
  }

  Ref tensor_tuple() const {
    Ref made(PyTuple_New(static_cast<Py_ssize_t>(num_tensors)));
    for (size_t i = 0; i < num_tensors; ++i)
      PyTuple_SetItem(made.get(), static_cast<Py_ssize_t>(i), Py_NewRef(tensors[i]));
    return made;
  }

  Ref key() const {
    Ref bytes(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words),
                                        static_cast<Py_ssize_t>(num_words * sizeof *words)));
    if (!num_options) return bytes;
    Ref made(PyTuple_New(static_cast<Py_ssize_t>(1 + num_options)));
    PyTuple_SetItem(made.get(), 0, bytes.release());
    for (size_t i = 0; i < num_options; ++i)
      PyTuple_SetItem(made.get(), static_cast<Py_ssize_t>(1 + i), Py_NewRef(options[i]));
    return made;
  }
};

void add_call(Arguments& call, PyObject* args, PyObject* kwargs) {
  const CallCache& cache = call.cache;
  for_each(cache.interposition_checks.get(), [](PyObject* check) {
    if (PyObject_IsTrue(Ref(PyObject_CallNoArgs(check)).get())) throw NotCacheable();
  });
  call.add_context();
  if (cache.of_method) {
    call.add_option(PyTuple_GetItem(args, 0));
    kwargs = PyTuple_GetItem(args, 3), args = PyTuple_GetItem(args, 2);
  }
  call.add_tuple(args);
  PyObject *name, *x;
  for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name, &x);)
    call.add_option(name), call.add(x);
}

// The entry of a call, or null; and its key, or null if the call cannot be cached.
PyObject* find(Arguments& call, PyObject* args, PyObject* kwargs, Ref& key) {
  PyObject* entry = nullptr;
  try {
    add_call(call, args, kwargs);
    key = call.key();
    entry = PyDict_GetItemWithError(call.cache.entries.get(), key.get());
  } catch (const NotCacheable&) {
  } catch (const PythonError&) {
  }
  if (PyErr_Occurred()) {  // also of an option that is not hashable
    // A signal handler may raise KeyboardInterrupt in a check, which is not for a cache to drop.
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
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
    if (cache.of_method && (PyTuple_Size(args) != 4 || !PyTuple_Check(PyTuple_GetItem(args, 2)) ||
                            !PyDict_Check(PyTuple_GetItem(args, 3))))
      raise(PyExc_TypeError, "expected (number, owner, args, kwargs)");
    Arguments call(cache);
    Ref key;
    const Ref entry = Ref::of(find(call, args, kwargs, key) ?: Py_None);
    if (PyObject_TypeCheck(entry.get(), prepared_call_type)) {
      const PreparedCall& prepared = value_of<PreparedCall>(entry.get());
      if (!output_overlaps(prepared, call)) return prepared.launch(call.device, call.stream, call.addresses, call.tensors);
      key = Ref();
    } else if (entry.get() != Py_None && cache.takes_tensors) {
      Ref result(PyObject_CallFunctionObjArgs(entry.get(), call.tensor_tuple().get(), nullptr));
      if (result.get() != Py_NotImplemented) return result.release();
      key = Ref();
    } else if (entry.get() != Py_None) {
      return PyObject_Call(entry.get(), args, kwargs);
    }
    const Ref named = kwargs ? Ref::of(kwargs) : Ref(PyDict_New());
    PyObject* given = key.get() ? key.get() : Py_None;
    return PyObject_CallFunctionObjArgs(cache.on_miss.get(), given, args, named.get(), nullptr);
  });
}

std::unique_ptr<CallCache> make_call_cache(PyObject* args) {
  PyObject *entries, *grad_mode, *on_miss, *checks;
  int of_method, on_cuda, tuple_is_plan = false, takes_tensors = false;
  require(PyArg_ParseTuple(args, "O!OOO!pp|pp", &PyDict_Type, &entries, &grad_mode, &on_miss, &PyTuple_Type, &checks,
                           &of_method, &on_cuda, &tuple_is_plan, &takes_tensors));
  auto cache = std::make_unique<CallCache>();
  cache->of_method = of_method, cache->on_cuda = on_cuda, cache->tuple_is_plan = tuple_is_plan;
  cache->takes_tensors = takes_tensors;
  cache->entries = Ref::of(entries), cache->grad_mode = Ref::of(grad_mode);
  cache->on_miss = Ref::of(on_miss), cache->interposition_checks = Ref::of(checks);
  return cache;
}

}  // namespace

PyTypeObject* add_call_cache_type(PyObject* module) {
  const char* name = "attn_ops.native._C.CallCache";
  return add_type<CallCache, make_call_cache>(module, name, {Py_tp_call, reinterpret_cast<void*>(call_cached)});
}

}  // namespace attn_ops
