// attn_ops.native._C: the launcher for eager calls. attn_ops/eager makes prepared calls and inserts and evicts them.
#include "extension.h"

namespace attn_ops {
namespace {

PyObject* connect(PyObject*, PyObject* path) {
  const char* name = PyUnicode_AsUTF8AndSize(path, nullptr);
  if (!name) return nullptr;
  use_driver(name);
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"connect", connect, METH_O, nullptr},
    {"is_regular", is_regular, METH_VARARGS, nullptr},
    {"contents", contents, METH_VARARGS, nullptr},
    {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

PyTypeObject* type_of(const char* module, const char* name) {
  const Ref found(PyImport_ImportModule(module));
  return reinterpret_cast<PyTypeObject*>(Ref(PyObject_GetAttrString(found.get(), name)).release());
}

void read_torch() {
  torch.tensor = type_of("torch", "Tensor"), torch.parameter = type_of("torch.nn", "Parameter");
  const Ref capsule(PyObject_GetAttrString(reinterpret_cast<PyObject*>(torch.tensor), "__dlpack_c_exchange_api__"));
  torch.exchange = static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  require(torch.exchange != nullptr);
  if (torch.exchange->major != kDLPackMajor || !torch.exchange->view)
    raise(PyExc_ImportError, "torch has another version of DLPack than 1");
}

}  // namespace
}  // namespace attn_ops

PyMODINIT_FUNC PyInit__C() {
  using namespace attn_ops;
  return or_null([] {
    read_torch();
    Ref module(PyModule_Create(&definition));
    image_type = add_image_type(module.get());
    prepared_call_type = add_prepared_call_type(module.get());
    add_call_cache_type(module.get());
    return module.release();
  });
}
