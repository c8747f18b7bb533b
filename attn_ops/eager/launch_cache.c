// Finds a call like an earlier one and makes its launches again: what attn_ops/eager/launch_cache.py remembers, without the
// interpreter. Built by Triton's own means for the helpers that it compiles on a user's machine.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>

static PyTypeObject *tensor_type, *parameter_type;
static PyObject *str_requires_grad;
static const DLPackExchangeAPI *exchange;  // what torch tells others of its tensors, without calls of Python

static struct {
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*device)(CUdevice *);
    CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);
    CUresult (*describe)(CUresult, const char **);
    CUresult (*encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                       const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
} driver;

static uint64_t address_of(const DLTensor *t) { return (uintptr_t)t->data + t->byte_offset; }

// ---- Repeat: the launches of a call, and its outputs -------------------------------------------------------------

// What the copy engine is told of a tensor; `map` is of the address at which it was encoded last.
typedef struct {
    CUtensorMap map;
    const uint64_t *address;
    uint64_t encoded;
    int type, swizzle;
    cuuint32_t rank;
    const void *sizes, *strides, *box;  // of a block; innermost first, strides in bytes and without the first
} TensorMap;

typedef struct {
    CUlaunchConfig config;
    CUlaunchAttribute early;
    CUfunction function;
    void **parameters;
    TensorMap *maps;
    Py_ssize_t num_maps;
} Launch;

typedef struct {
    Py_ssize_t given;  // or -1
    uint64_t offset;
} Source;

typedef struct {
    PyObject_HEAD
    PyObject *outputs, *kept;  // `kept` owns the bytes that parameters and maps point at
    bool unpack, fills;  // an output that is among the tensors given
    Py_ssize_t num_given, num_inputs, num_outputs, num_launches;
    uint64_t *cells;  // addresses of the inputs, then of the outputs: kernels read them from here
    Source *sources;  // of the inputs, from the addresses given
    Launch *launches;
} Repeat;

static void Repeat_dealloc(Repeat *self) {
    for (Py_ssize_t i = 0; self->launches && i < self->num_launches; i++) {
        PyMem_Free(self->launches[i].parameters);
        free(self->launches[i].maps);
    }
    PyMem_Free(self->launches);
    PyMem_Free(self->sources);
    PyMem_Free(self->cells);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->kept);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

// Where a parameter has its value: in the bytes given, or in a cell.
static void *pointer_at(Repeat *self, PyObject *parameter) {
    if (PyBytes_Check(parameter)) return PyBytes_AS_STRING(parameter);
    Py_ssize_t cell = PyLong_AsSsize_t(parameter), num_cells = self->num_inputs + self->num_outputs;
    if (PyErr_Occurred()) return NULL;
    if (cell < 0 || cell >= num_cells) return PyErr_SetString(PyExc_IndexError, "a cell that is not there"), NULL;
    return &self->cells[cell];
}

static bool lay_out_map(Repeat *self, TensorMap *map, PyObject *description) {
    PyObject *pointer, *sizes, *strides, *box;
    if (!PyArg_ParseTuple(description, "OiiSSS", &pointer, &map->type, &map->swizzle, &sizes, &strides, &box))
        return false;
    map->address = pointer_at(self, pointer);
    map->rank = PyBytes_GET_SIZE(sizes) / sizeof(cuuint64_t);
    map->sizes = PyBytes_AS_STRING(sizes);
    map->strides = PyBytes_AS_STRING(strides);
    map->box = PyBytes_AS_STRING(box);
    return map->address != NULL;
}

static bool lay_out(Repeat *self, Launch *launch, PyObject *description) {
    unsigned long long function;
    PyObject *parameters;
    int early;
    CUlaunchConfig *c = &launch->config;
    if (!PyArg_ParseTuple(description, "K(III)IIpO!", &function, &c->gridDimX, &c->gridDimY, &c->gridDimZ,
                          &c->blockDimX, &c->sharedMemBytes, &early, &PyTuple_Type, &parameters))
        return false;
    c->blockDimY = c->blockDimZ = 1;
    launch->function = (CUfunction)(uintptr_t)function;
    launch->early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    launch->early.value.programmaticStreamSerializationAllowed = 1;
    c->attrs = &launch->early;
    c->numAttrs = early != 0;
    Py_ssize_t size = PyTuple_GET_SIZE(parameters), num_maps = 0;
    for (Py_ssize_t i = 0; i < size; i++) num_maps += PyTuple_Check(PyTuple_GET_ITEM(parameters, i));
    launch->parameters = PyMem_Calloc(size + 1, sizeof(void *));
    launch->maps = num_maps ? aligned_alloc(_Alignof(TensorMap), num_maps * sizeof(TensorMap)) : NULL;
    if (!launch->parameters || (num_maps && !launch->maps)) return PyErr_NoMemory(), false;
    if (num_maps) memset(launch->maps, 0, num_maps * sizeof(TensorMap));
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *parameter = PyTuple_GET_ITEM(parameters, i);
        if (PyTuple_Check(parameter)) {
            TensorMap *map = &launch->maps[launch->num_maps++];
            if (!lay_out_map(self, map, parameter)) return false;
            launch->parameters[i] = &map->map;
        } else {
            launch->parameters[i] = pointer_at(self, parameter);
            if (!launch->parameters[i]) return false;
        }
    }
    return true;
}

static PyObject *new_repeat(PyTypeObject *type, PyObject *launches, Py_ssize_t num_inputs, PyObject *outputs,
                            bool unpack) {
    Repeat *self = (Repeat *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->outputs = Py_NewRef(outputs);
    self->kept = Py_NewRef(launches);
    self->unpack = unpack;
    self->num_given = self->num_inputs = num_inputs;
    self->num_outputs = PyTuple_GET_SIZE(outputs);
    self->cells = PyMem_Calloc(num_inputs + self->num_outputs + 1, sizeof(uint64_t));
    self->sources = PyMem_Calloc(num_inputs + 1, sizeof(Source));
    self->launches = PyMem_Calloc(PyTuple_GET_SIZE(launches) + 1, sizeof(Launch));
    self->num_launches = PyTuple_GET_SIZE(launches);
    if (!self->cells || !self->sources || !self->launches) return PyErr_NoMemory(), Py_DECREF(self), NULL;
    for (Py_ssize_t i = 0; i < num_inputs; i++) self->sources[i].given = i;
    for (Py_ssize_t i = 0; i < self->num_launches; i++)
        if (!lay_out(self, &self->launches[i], PyTuple_GET_ITEM(launches, i))) return Py_DECREF(self), NULL;
    return (PyObject *)self;
}

static PyObject *Repeat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *launches, *outputs;
    Py_ssize_t num_given;
    int unpack;
    if (!PyArg_ParseTuple(args, "O!nO!p", &PyTuple_Type, &launches, &num_given, &PyTuple_Type, &outputs, &unpack))
        return NULL;
    return new_repeat(type, launches, num_given, outputs, unpack);
}

static PyObject *Repeat_through(Repeat *self, PyObject *args) {
    PyObject *sources, *filled;
    Py_ssize_t num_given;
    int unpack;
    if (!PyArg_ParseTuple(args, "nO!O!p", &num_given, &PyTuple_Type, &sources, &PyTuple_Type, &filled, &unpack))
        return NULL;
    if (PyTuple_GET_SIZE(sources) != self->num_inputs || PyTuple_GET_SIZE(filled) != self->num_outputs)
        return PyErr_Format(PyExc_ValueError, "expected %zd sources and %zd outputs", self->num_inputs, self->num_outputs);
    PyObject *outputs = PyTuple_New(self->num_outputs);
    if (!outputs) return NULL;
    bool fills = false, fits = true;
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) {
        PyObject *output = PyTuple_GET_ITEM(filled, i);
        fills |= output != Py_None;
        fits &= output == Py_None || (PyLong_Check(output) && (size_t)PyLong_AsSsize_t(output) < (size_t)num_given);
        PyTuple_SET_ITEM(outputs, i, Py_NewRef(output == Py_None ? PyTuple_GET_ITEM(self->outputs, i) : output));
    }
    if (!fits) return PyErr_SetString(PyExc_IndexError, "an output that is not given"), Py_DECREF(outputs), NULL;
    Repeat *other = (Repeat *)new_repeat(Py_TYPE(self), self->kept, self->num_inputs, outputs, unpack);
    Py_DECREF(outputs);
    if (!other) return NULL;
    other->num_given = num_given;
    other->fills = fills;
    for (Py_ssize_t i = 0; i < other->num_inputs; i++) {
        long long offset;
        Source *source = &other->sources[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(sources, i), "nL", &source->given, &offset))
            return Py_DECREF(other), NULL;
        source->offset = (uint64_t)offset;
        if (source->given >= num_given)
            return PyErr_SetString(PyExc_IndexError, "a source that is not given"), Py_DECREF(other), NULL;
    }
    return (PyObject *)other;
}

static PyObject *make_output(PyObject *output, PyObject *const *given) {
    if (PyLong_Check(output)) return Py_NewRef(given[PyLong_AsSsize_t(output)]);
    return PyObject_TypeCheck(output, tensor_type) ? Py_NewRef(output) : PyObject_CallNoArgs(output);
}

static PyObject *make_outputs(Repeat *self, PyObject *const *given) {
    PyObject *made = PyTuple_New(self->num_outputs);
    for (Py_ssize_t i = 0; made && i < self->num_outputs; i++) {
        PyObject *output = make_output(PyTuple_GET_ITEM(self->outputs, i), given);
        if (!output) return Py_DECREF(made), NULL;
        PyTuple_SET_ITEM(made, i, output);
        DLTensor t;
        if (exchange->dltensor_from_py_object_no_sync(output, &t)) return Py_DECREF(made), NULL;
        self->cells[self->num_inputs + i] = address_of(&t);
    }
    return made;
}

static CUresult encode_all(Launch *launch) {
    static const cuuint32_t every[] = {1, 1, 1, 1, 1};
    CUresult code = CUDA_SUCCESS;
    for (Py_ssize_t i = 0; i < launch->num_maps && code == CUDA_SUCCESS; i++) {
        TensorMap *m = &launch->maps[i];
        if (m->encoded == *m->address) continue;
        code = driver.encode(&m->map, m->type, m->rank, (void *)(uintptr_t)*m->address, m->sizes, m->strides, m->box,
                             every, CU_TENSOR_MAP_INTERLEAVE_NONE, m->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        m->encoded = code == CUDA_SUCCESS ? *m->address : 0;
    }
    return code;
}

static bool launch_all(Repeat *self, CUstream stream) {
    CUresult code = CUDA_SUCCESS;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < self->num_launches && code == CUDA_SUCCESS; i++) {
        Launch *launch = &self->launches[i];
        launch->config.hStream = stream;
        code = encode_all(launch);
        if (code == CUDA_SUCCESS) code = driver.launch(&launch->config, launch->function, launch->parameters, NULL);
    }
    Py_END_ALLOW_THREADS;
    if (code == CUDA_SUCCESS) return true;
    const char *reason = NULL;
    driver.describe(code, &reason);
    PyErr_Format(PyExc_RuntimeError, "CUDA driver: a kernel could not be launched: %s", reason ? reason : "unknown");
    return false;
}

static PyObject *run(Repeat *self, CUstream stream, const uint64_t *addresses, PyObject *const *given) {
    for (Py_ssize_t i = 0; i < self->num_inputs; i++) {
        Source source = self->sources[i];
        self->cells[i] = (source.given < 0 ? 0 : addresses[source.given]) + source.offset;
    }
    PyObject *made = make_outputs(self, given);
    if (!made || !launch_all(self, stream)) return Py_XDECREF(made), NULL;
    if (!self->unpack) return made;
    PyObject *result = self->num_outputs ? Py_NewRef(PyTuple_GET_ITEM(made, 0)) : Py_NewRef(Py_None);
    Py_DECREF(made);
    return result;
}

static PyObject *Repeat_call(Repeat *self, PyObject *args, PyObject *kwargs) {
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count != 1 + self->num_given)
        return PyErr_Format(PyExc_TypeError, "%zd arguments given, expected a stream and %zd addresses", count,
                            self->num_given);
    if (self->fills) return PyErr_SetString(PyExc_TypeError, "it fills tensors, of which addresses are not enough"), NULL;
    uint64_t numbers[count];
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args, i));
        if (PyErr_Occurred()) return NULL;
    }
    return run(self, (CUstream)(uintptr_t)numbers[0], numbers + 1, NULL);
}

static PyMethodDef repeat_methods[] = {
    {"through", (PyCFunction)Repeat_through, METH_VARARGS,
     "through(num_given, sources, filled, unpack): the same launches for other tensors\n\n"
     "sources  (which of those given, or -1; bytes from its start), one for each tensor that this one is given\n"
     "filled   which of those given an output is put in, None for one that is made"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot repeat_slots[] = {
    {Py_tp_doc, "Repeat(launches, num_given, outputs, unpack)(stream, *addresses)\n\n"
                "launches  ((function, (x, y, z), threads, shared, early, parameters), ...), a parameter being bytes, the\n"
                "          number of a tensor given or made, whose address it is, or (address in one of these ways,\n"
                "          type, swizzle, sizes, strides, box) of a tensor map, as cuTensorMapEncodeTiled takes them\n"
                "outputs   functions that allocate one each, or tensors without elements, the same every time\n"
                "unpack    return the first output, or None, instead of a tuple of all"},
    {Py_tp_new, Repeat_new},
    {Py_tp_dealloc, Repeat_dealloc},
    {Py_tp_methods, repeat_methods},
    {Py_tp_call, Repeat_call},
    {0, NULL},
};
static PyType_Spec repeat_spec = {"attn_ops.eager.launch_cache.Repeat", sizeof(Repeat), 0, Py_TPFLAGS_DEFAULT, repeat_slots};
static PyTypeObject *repeat_type;

// ---- Calls: those of one op, or of a method around one, that are remembered --------------------------------------

typedef struct {
    PyObject_HEAD
    PyObject *calls, *grad_mode, *first, *watchers;
} Calls;

static int Calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(self->calls);
    Py_VISIT(self->grad_mode);
    Py_VISIT(self->first);
    Py_VISIT(self->watchers);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Calls_clear(Calls *self) {
    Py_CLEAR(self->calls);
    Py_CLEAR(self->grad_mode);
    Py_CLEAR(self->first);
    Py_CLEAR(self->watchers);
    return 0;
}

static void Calls_dealloc(Calls *self) {
    PyObject_GC_UnTrack(self);
    Calls_clear(self);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *Calls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *calls, *grad_mode, *first, *watchers = NULL;
    if (!PyArg_ParseTuple(args, "O!OO|O!", &PyDict_Type, &calls, &grad_mode, &first, &PyTuple_Type, &watchers))
        return NULL;
    Calls *self = (Calls *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->calls = Py_NewRef(calls);
    self->grad_mode = Py_NewRef(grad_mode);
    self->first = Py_NewRef(first);
    self->watchers = Py_XNewRef(watchers);
    return (PyObject *)self;
}

enum { MOST_WORDS = 384, MOST_ARGUMENTS = 64, MOST_OPTIONS = 2 * MOST_ARGUMENTS };
enum Kind { OPTION, LIST, TUPLE, TENSOR };

// What calls that are alike share: words, and options, which are compared as Python objects.
typedef struct {
    uint64_t words[MOST_WORDS], addresses[MOST_ARGUMENTS], ends[MOST_ARGUMENTS];  // bytes of the tensors
    PyObject *tensors[MOST_ARGUMENTS];                                          // borrowed from the call, as options
    PyObject *options[MOST_OPTIONS];
    Py_ssize_t num_words, num_addresses, num_options;
    CUstream stream;
    bool grad_mode;
} Call;

// These return whether the call can be remembered so far; if not, an error may be set.

static bool put(Call *call, uint64_t word) {
    if (call->num_words == MOST_WORDS) return false;
    call->words[call->num_words++] = word;
    return true;
}

static bool put_option(Call *call, PyObject *option) {
    if (call->num_options == MOST_OPTIONS) return false;
    call->options[call->num_options++] = option;
    return put(call, OPTION);
}

static bool put_list(Call *call, PyObject *list) {
    bool fits = put(call, LIST | (uint64_t)PyList_GET_SIZE(list) << 8);
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(list); i++)
        fits = put(call, (uintptr_t)PyList_GET_ITEM(list, i));
    return fits;
}

static bool put_tensor(Call *call, PyObject *tensor) {
    DLTensor t;
    if (call->num_addresses == MOST_ARGUMENTS || exchange->dltensor_from_py_object_no_sync(tensor, &t)) return false;
    uint64_t address = address_of(&t), misaligned = address & 15, requires_grad = 0;  // repeat.py's ALIGNMENT
    uint64_t length = 1, empty = 0;
    for (int d = 0; d < t.ndim; d++) {
        length += (t.shape[d] - 1) * (t.strides ? t.strides[d] : 0);
        empty |= t.shape[d] == 0;
    }
    call->tensors[call->num_addresses] = tensor;
    call->ends[call->num_addresses] = address + (empty ? 0 : length * t.dtype.bits / 8);
    call->addresses[call->num_addresses++] = address;
    if (call->grad_mode) {
        PyObject *wanted = PyObject_GetAttr(tensor, str_requires_grad);
        if (!wanted) return false;
        requires_grad = wanted == Py_True;
        Py_DECREF(wanted);
    }
    uint64_t kind = TENSOR | (uint64_t)(uint8_t)t.ndim << 8 | (uint64_t)t.dtype.code << 16 |
                    (uint64_t)t.dtype.bits << 24 | misaligned << 32 | requires_grad << 36 |
                    (uint64_t)t.device.device_type << 40;
    bool fits = (t.strides || !t.ndim) && put(call, kind) && put(call, t.device.device_id);
    for (int d = 0; fits && d < t.ndim; d++) fits = put(call, t.shape[d]) && put(call, t.strides[d]);
    return fits;
}

static bool put_argument(Calls *self, Call *call, PyObject *x) {
    if (Py_TYPE(x) == tensor_type || Py_TYPE(x) == parameter_type) return put_tensor(call, x);
    if (PyObject_TypeCheck(x, tensor_type)) return false;  // what a subclass does is its own affair
    if (PyList_Check(x)) return !self->watchers && put_list(call, x);
    if (!PyTuple_Check(x)) return put_option(call, x);
    bool fits = put(call, TUPLE | (uint64_t)PyTuple_GET_SIZE(x) << 8);
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(x); i++)
        fits = put_argument(self, call, PyTuple_GET_ITEM(x, i));
    return fits;
}

static bool is_watched(Calls *self) {
    Py_ssize_t count = self->watchers ? PyTuple_GET_SIZE(self->watchers) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *watcher = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->watchers, i));
        int watches = watcher ? PyObject_IsTrue(watcher) : -1;
        Py_XDECREF(watcher);
        if (watches) return true;
    }
    return false;
}

static bool put_circumstances(Calls *self, Call *call) {
    CUdevice device;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    PyObject *grad_mode = PyObject_CallNoArgs(self->grad_mode);
    if (!grad_mode) return false;
    call->grad_mode = grad_mode == Py_True;
    Py_DECREF(grad_mode);
    if (driver.device(&device) != CUDA_SUCCESS) return false;  // a thread that has not used the GPU yet
    if (exchange->current_work_stream(kDLCUDA, device, (void **)&call->stream)) return false;
    driver.is_capturing(call->stream, &capturing);  // what is wrong with the stream, the launch will say
    return put(call, PyThread_get_thread_ident()) && put(call, device) &&
           put(call, (uint64_t)call->grad_mode << 1 | (capturing != CU_STREAM_CAPTURE_STATUS_NONE));
}

static bool put_call(Calls *self, Call *call, PyObject *args, PyObject *kwargs) {
    PyObject *name, *value;
    if (is_watched(self) || !put_circumstances(self, call)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!put_argument(self, call, PyTuple_GET_ITEM(args, i))) return false;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value);)
        if (!put_option(call, name) || !put_argument(self, call, value)) return false;
    return true;
}

static PyObject *key_of(const Call *call) {
    PyObject *words = PyBytes_FromStringAndSize((char *)call->words, call->num_words * sizeof(uint64_t));
    if (!words || !call->num_options) return words;
    PyObject *key = PyTuple_New(1 + call->num_options);
    if (!key) return Py_DECREF(words), NULL;
    PyTuple_SET_ITEM(key, 0, words);
    for (Py_ssize_t i = 0; i < call->num_options; i++) PyTuple_SET_ITEM(key, 1 + i, Py_NewRef(call->options[i]));
    return key;
}

// Whether a tensor that would be filled shares memory with another one.
static bool is_entangled(const Repeat *repeat, const Call *call) {
    for (Py_ssize_t i = 0; repeat->fills && i < repeat->num_outputs; i++) {
        PyObject *output = PyTuple_GET_ITEM(repeat->outputs, i);
        if (!PyLong_Check(output)) continue;
        Py_ssize_t filled = PyLong_AsSsize_t(output);
        for (Py_ssize_t j = 0; j < call->num_addresses; j++)
            if (j != filled && call->addresses[j] < call->ends[filled] && call->addresses[filled] < call->ends[j])
                return true;
    }
    return false;
}

// What is remembered of a call, and its key unless it cannot be remembered.
static PyObject *find(Calls *self, Call *call, PyObject *args, PyObject *kwargs, PyObject **key) {
    call->num_words = call->num_addresses = call->num_options = 0;
    *key = put_call(self, call, args, kwargs) ? key_of(call) : NULL;
    PyObject *found = *key ? Py_XNewRef(PyDict_GetItemWithError(self->calls, *key)) : NULL;
    if (PyErr_Occurred()) {  // something among the options that has no hash, too
        PyErr_Clear();
        Py_CLEAR(*key);
    }
    return found;
}

static PyObject *Calls_call(Calls *self, PyObject *args, PyObject *given) {
    PyObject *kwargs = given ? Py_NewRef(given) : PyDict_New(), *key, *result;
    if (!kwargs) return NULL;
    Call call;
    PyObject *found = find(self, &call, args, kwargs, &key);
    bool repeats = found && PyObject_TypeCheck(found, repeat_type);
    if (repeats && is_entangled((Repeat *)found, &call))
        result = PyObject_CallFunctionObjArgs(self->first, Py_None, args, kwargs, NULL);
    else if (repeats)
        result = run((Repeat *)found, call.stream, call.addresses, call.tensors);
    else if (!found)
        result = PyObject_CallFunctionObjArgs(self->first, key ? key : Py_None, args, kwargs, NULL);
    else
        result = PyObject_Call(found, args, kwargs);
    Py_XDECREF(found);
    Py_XDECREF(key);
    Py_DECREF(kwargs);
    return result;
}

static PyObject *Calls_find(Calls *self, PyObject *args, PyObject *given) {
    PyObject *kwargs = given ? Py_NewRef(given) : PyDict_New(), *key;
    if (!kwargs) return NULL;
    Call call;
    PyObject *found = find(self, &call, args, kwargs, &key);
    Py_XDECREF(key);
    Py_DECREF(kwargs);
    return found ? found : Py_NewRef(Py_None);
}

static PyMethodDef calls_methods[] = {
    {"find", (PyCFunction)(void (*)(void))Calls_find, METH_VARARGS | METH_KEYWORDS,
     "find(*args, **kwargs): what is remembered of such a call, or None"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "Calls(calls, grad_mode, first, watchers)(*args, **kwargs)\n\n"
                "calls      {key: Repeat, or else what to call}, filled by the caller\n"
                "grad_mode  grad_mode(): a part of every key\n"
                "first      first(key, args, kwargs) makes a call unlike every earlier one; key is None for one that\n"
                "           cannot be remembered\n"
                "watchers   of a method: functions that say whether somebody looks on, who is to see the op called; lists,\n"
                "           which are the plans of an op, cannot be remembered then"},
    {Py_tp_new, Calls_new},
    {Py_tp_dealloc, Calls_dealloc},
    {Py_tp_traverse, Calls_traverse},
    {Py_tp_clear, Calls_clear},
    {Py_tp_methods, calls_methods},
    {Py_tp_call, Calls_call},
    {0, NULL},
};
static PyType_Spec calls_spec = {"attn_ops.eager.launch_cache.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 calls_slots};

// ---- The module --------------------------------------------------------------------------------------------------

static PyObject *connect(PyObject *module, PyObject *path) {
    const char *name = PyUnicode_AsUTF8(path);
    void *library = name ? dlopen(name, RTLD_LAZY) : NULL;
    if (!name) return NULL;
    if (library) {
        *(void **)&driver.launch = dlsym(library, "cuLaunchKernelEx");
        *(void **)&driver.device = dlsym(library, "cuCtxGetDevice");
        *(void **)&driver.is_capturing = dlsym(library, "cuStreamIsCapturing");
        *(void **)&driver.describe = dlsym(library, "cuGetErrorString");
        *(void **)&driver.encode = dlsym(library, "cuTensorMapEncodeTiled");
    }
    if (library && driver.launch && driver.device && driver.is_capturing && driver.describe && driver.encode)
        Py_RETURN_NONE;
    return PyErr_Format(PyExc_OSError, "%s is not there, or not a driver for CUDA 12", name);
}

static PyMethodDef functions[] = {
    {"connect", connect, METH_O, "connect(path): launch kernels by the CUDA driver at `path`"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "repeat", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_repeat(void) {
    PyObject *torch = PyImport_ImportModule("torch"), *module = PyModule_Create(&definition);
    PyObject *repeat = PyType_FromSpec(&repeat_spec), *calls = PyType_FromSpec(&calls_spec);
    if (!torch || !module || !repeat || !calls) return NULL;
    repeat_type = (PyTypeObject *)repeat;
    tensor_type = (PyTypeObject *)PyObject_GetAttrString(torch, "Tensor");
    str_requires_grad = PyUnicode_InternFromString("requires_grad");
    PyObject *nn = PyObject_GetAttrString(torch, "nn");
    parameter_type = nn ? (PyTypeObject *)PyObject_GetAttrString(nn, "Parameter") : NULL;
    Py_XDECREF(nn);
    Py_DECREF(torch);
    if (!parameter_type || !tensor_type || !str_requires_grad) return NULL;
    PyObject *capsule = PyObject_GetAttrString((PyObject *)tensor_type, "__dlpack_c_exchange_api__");
    if (!capsule) return NULL;
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!exchange) return NULL;
    if (exchange->header.version.major != DLPACK_MAJOR_VERSION || !exchange->dltensor_from_py_object_no_sync)
        return PyErr_SetString(PyExc_ImportError, "torch speaks another version of DLPack"), NULL;
    if (PyModule_AddObject(module, "Repeat", repeat) || PyModule_AddObject(module, "Calls", calls)) return NULL;
    return module;
}
