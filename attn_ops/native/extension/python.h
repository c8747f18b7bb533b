// References, errors and types of Python in C++, within the limited API: one build serves every version from 3.10.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace attn_ops {

struct PythonError {};  // Python has the error

class Ref {  // owns a reference
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {
    if (!owned) throw PythonError();
  }
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept { return std::swap(object_, other.object_), *this; }
  ~Ref() { Py_XDECREF(object_); }
  static Ref of(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

inline void require(bool holds) {
  if (!holds) throw PythonError();
}

[[noreturn]] inline void raise(PyObject* type, const char* text) {
  PyErr_SetString(type, text);
  throw PythonError();
}

// Other threads run Python code during its life.
struct WithoutGil {
  PyThreadState* const thread = PyEval_SaveThread();
  WithoutGil() = default;
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(thread); }
};

// The new reference that `function` returns, or null with the error of Python.
template <class F>
PyObject* or_null(F function) {
  try {
    return function();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

template <class F>
void for_each(PyObject* tuple, F function) {
  for (Py_ssize_t i = 0, size = PyTuple_Size(tuple); i < size; ++i) function(PyTuple_GetItem(tuple, i));
  require(!PyErr_Occurred());
}

// ---- Python objects that own a C++ object ---------------------------------------------------------------------------

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

// Adds a type to the module: `make(type, args)` makes the T of an object, and `slot` is one more slot of the type.
template <class T, std::unique_ptr<T> (*make)(PyObject* args)>
PyTypeObject* add_type(PyObject* module, const char* name, PyType_Slot slot) {
  newfunc create = [](PyTypeObject* type, PyObject* args, PyObject*) {
    return or_null([&] { return wrap(type, make(args)); });
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(create)}, {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<T>)}, slot, {}};
  PyType_Spec spec = {name, sizeof(Object<T>), 0, Py_TPFLAGS_DEFAULT, slots};
  Ref type(PyType_FromSpec(&spec));
  require(!PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type.get())));
  return reinterpret_cast<PyTypeObject*>(type.release());
}

}  // namespace attn_ops
