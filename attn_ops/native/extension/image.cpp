#include "extension.h"

namespace attn_ops {
namespace {

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
  int kind;
  Parameter parameter = {};
  require(PyArg_ParseTuple(row, "ibs", &kind, &parameter.index, &parameter.name));
  parameter.kind = static_cast<Kind>(kind);
  return parameter;
}

std::unique_ptr<EagerImage> make_image(PyObject* args) {
  auto made = std::make_unique<EagerImage>();
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
  image.parameters = made->parameters.data(), image.num_parameters = static_cast<uint32_t>(made->parameters.size());
  made->arguments = Ref::of(args);
  return made;
}

PyObject* load_image(PyObject* self, PyObject* device) {
  return or_null([&] {
    const long index = PyLong_AsLong(device);
    require(!PyErr_Occurred());
    require(load(value_of<EagerImage>(self).image, static_cast<int>(index)));
    return Py_NewRef(Py_None);
  });
}

PyMethodDef methods[] = {{"load", load_image, METH_O, nullptr}, {}};

}  // namespace

PyTypeObject* add_image_type(PyObject* module) {
  return add_type<EagerImage, make_image>(module, "attn_ops.native._C.Image", {Py_tp_methods, methods});
}

}  // namespace attn_ops
