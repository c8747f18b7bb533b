// What the types of attn_ops.native._C share. _C.pyi documents them.
#pragma once

#include "../launcher.h"
#include "dlpack.h"
#include "python.h"

namespace attn_ops {

constexpr size_t kMaxTensors = 64;  // of a call or a launch, without those of plans

inline struct Torch {  // read when the module is imported
  PyTypeObject *tensor, *parameter;
  const DLPackExchange* exchange;
} torch;

inline PyTypeObject *image_type, *prepared_call_type;

inline void require(const Status& status) {
  if (status.code != Code::kOk) raise(PyExc_RuntimeError, status.text.c_str());
}

// ---- Image: a loaded kernel -----------------------------------------------------------------------------------------

struct EagerImage {
  Ref arguments;  // own the text and the cubin
  std::vector<MapSpec> maps;
  std::vector<Parameter> parameters;
  LoadedFunctions* loaded = new LoadedFunctions{};  // never deleted: CUDA graphs may launch what is loaded
  Image image{};
};

PyTypeObject* add_image_type(PyObject* module);

// ---- PreparedCall: the launches of a call, ready for other tensors ----------------------------------------------------

struct PreparedLaunch {
  const Image* image;
  std::vector<uint8_t> tensors;  // of the addresses of the call
  std::vector<int64_t> integers;
  std::vector<double> floats;
};

// A call's addresses are those of the sources, then of the outputs, then of the scratch memory.
struct PreparedCall {
  struct Source {  // bytes from the start of an argument; the address itself if there is no argument
    Py_ssize_t argument;
    uint64_t offset;
  };
  Ref launch_rows, outputs, scratch;  // the rows own the images
  std::vector<PreparedLaunch> launches;
  std::vector<Source> sources;
  Py_ssize_t num_outputs = 0, num_scratch = 0;
  bool unpack = false, takes_arguments = false, writes_arguments = false;

  // Launches with these arguments on the device, which is current: the outputs, a new reference.
  PyObject* launch(int device, void* stream, const uint64_t* addresses, PyObject* const* arguments) const;
};

PyTypeObject* add_prepared_call_type(PyObject* module);

// ---- CallCache: finds the prepared call of a call by its key ----------------------------------------------------------

PyTypeObject* add_call_cache_type(PyObject* module);

// ---- Results of kernels on the CPU ------------------------------------------------------------------------------------

PyObject* is_regular(PyObject*, PyObject* args);

// ---- Contents of tensors on the CPU -----------------------------------------------------------------------------------

PyObject* contents(PyObject*, PyObject* args);

}  // namespace attn_ops
