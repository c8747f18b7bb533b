// Looks up an eager call by its cache key and replays its kernel launches, without the Python interpreter. Entries are
// inserted and evicted in Python (attn_ops/eager/launch_cache.py). Triton's own means for C modules build it, on the
// user's machine.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>

static PyTypeObject *tensor_type, *parameter_type;
static PyObject *str_requires_grad;
static const DLPackExchangeAPI *exchange;  // torch's C API to read tensors, without calls of Python

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

// ---- PreparedCall: the launches of a call, and its outputs -------------------------------------------------------

// A tensor map (TMA descriptor) and what it is encoded from. It is encoded again when the address changes.
typedef struct {
    CUtensorMap map;
    const uint64_t *address;
    uint64_t encoded_address;
    int type, swizzle;
    cuuint32_t rank;
    const void *sizes, *strides, *box;  // innermost dimension first; strides in bytes, without that dimension's
} TensorMap;

typedef struct {
    CUlaunchConfig config;
    CUlaunchAttribute pdl;
    CUfunction function;
    void **parameters;
    TensorMap *maps;
    Py_ssize_t num_maps;
} Launch;

// Where an input of the op lies: `offset` bytes into a tensor argument, or at the address `offset`.
typedef struct {
    Py_ssize_t argument;  // or -1
    uint64_t offset;
} Source;

typedef struct {
    PyObject_HEAD
    PyObject *outputs, *descriptions;  // `descriptions` owns the bytes that parameters and maps point at
    bool unpack, writes_arguments;     // the latter: some output is one of the tensor arguments
    Py_ssize_t num_arguments, num_inputs, num_outputs, num_launches;
    uint64_t *pointers;  // addresses of the inputs, then of the outputs: kernel parameters point here
    Source *sources;     // one for each input
    Launch *launches;
} PreparedCall;

static void PreparedCall_dealloc(PreparedCall *self) {
    for (Py_ssize_t i = 0; self->launches && i < self->num_launches; i++) {
        PyMem_Free(self->launches[i].parameters);
        free(self->launches[i].maps);
    }
    PyMem_Free(self->launches);
    PyMem_Free(self->sources);
    PyMem_Free(self->pointers);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->descriptions);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

// The storage of a parameter's value: the bytes themselves, or the pointer of an input or output.
static void *parameter_storage(PreparedCall *self, PyObject *parameter) {
    if (PyBytes_Check(parameter)) return PyBytes_AS_STRING(parameter);
    Py_ssize_t index = PyLong_AsSsize_t(parameter), count = self->num_inputs + self->num_outputs;
    if (PyErr_Occurred()) return NULL;
    if (index >= 0 && index < count) return &self->pointers[index];
    return PyErr_Format(PyExc_IndexError, "parameter %zd is no tensor, expected an index below %zd", index, count);
}

static bool init_tensor_map(PreparedCall *self, TensorMap *map, PyObject *description) {
    PyObject *pointer, *sizes, *strides, *box;
    if (!PyArg_ParseTuple(description, "OiiSSS", &pointer, &map->type, &map->swizzle, &sizes, &strides, &box))
        return false;
    map->address = parameter_storage(self, pointer);
    map->rank = PyBytes_GET_SIZE(sizes) / sizeof(cuuint64_t);
    map->sizes = PyBytes_AS_STRING(sizes);
    map->strides = PyBytes_AS_STRING(strides);
    map->box = PyBytes_AS_STRING(box);
    return map->address != NULL;
}

static bool init_launch(PreparedCall *self, Launch *launch, PyObject *description) {
    unsigned long long function;
    PyObject *parameters;
    int pdl;
    CUlaunchConfig *c = &launch->config;
    if (!PyArg_ParseTuple(description, "K(III)IIpO!", &function, &c->gridDimX, &c->gridDimY, &c->gridDimZ,
                          &c->blockDimX, &c->sharedMemBytes, &pdl, &PyTuple_Type, &parameters))
        return false;
    c->blockDimY = c->blockDimZ = 1;
    launch->function = (CUfunction)(uintptr_t)function;
    launch->pdl.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    launch->pdl.value.programmaticStreamSerializationAllowed = 1;
    c->attrs = &launch->pdl;
    c->numAttrs = pdl != 0;
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
            if (!init_tensor_map(self, map, parameter)) return false;
            launch->parameters[i] = &map->map;
        } else {
            launch->parameters[i] = parameter_storage(self, parameter);
            if (!launch->parameters[i]) return false;
        }
    }
    return true;
}

static PyObject *new_prepared_call(PyTypeObject *type, PyObject *launches, Py_ssize_t num_inputs, PyObject *outputs,
                                   bool unpack) {
    PreparedCall *self = (PreparedCall *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->outputs = Py_NewRef(outputs);
    self->descriptions = Py_NewRef(launches);
    self->unpack = unpack;
    self->num_arguments = self->num_inputs = num_inputs;
    self->num_outputs = PyTuple_GET_SIZE(outputs);
    self->pointers = PyMem_Calloc(num_inputs + self->num_outputs + 1, sizeof(uint64_t));
    self->sources = PyMem_Calloc(num_inputs + 1, sizeof(Source));
    self->launches = PyMem_Calloc(PyTuple_GET_SIZE(launches) + 1, sizeof(Launch));
    self->num_launches = PyTuple_GET_SIZE(launches);
    if (!self->pointers || !self->sources || !self->launches) return PyErr_NoMemory(), Py_DECREF(self), NULL;
    for (Py_ssize_t i = 0; i < num_inputs; i++) self->sources[i].argument = i;
    for (Py_ssize_t i = 0; i < self->num_launches; i++)
        if (!init_launch(self, &self->launches[i], PyTuple_GET_ITEM(launches, i))) return Py_DECREF(self), NULL;
    return (PyObject *)self;
}

static PyObject *PreparedCall_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *launches, *outputs;
    Py_ssize_t num_arguments;
    int unpack;
    if (!PyArg_ParseTuple(args, "O!nO!p", &PyTuple_Type, &launches, &num_arguments, &PyTuple_Type, &outputs, &unpack))
        return NULL;
    return new_prepared_call(type, launches, num_arguments, outputs, unpack);
}

static PyObject *PreparedCall_rebind(PreparedCall *self, PyObject *args) {
    PyObject *sources, *destinations;
    Py_ssize_t num_arguments;
    int unpack;
    if (!PyArg_ParseTuple(args, "nO!O!p", &num_arguments, &PyTuple_Type, &sources, &PyTuple_Type, &destinations,
                          &unpack))
        return NULL;
    if (PyTuple_GET_SIZE(sources) != self->num_inputs || PyTuple_GET_SIZE(destinations) != self->num_outputs)
        return PyErr_Format(PyExc_ValueError, "got %zd sources and %zd destinations, expected %zd and %zd",
                            PyTuple_GET_SIZE(sources), PyTuple_GET_SIZE(destinations), self->num_inputs,
                            self->num_outputs);
    PyObject *outputs = PyTuple_New(self->num_outputs);
    if (!outputs) return NULL;
    bool writes_arguments = false, in_range = true;
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) {
        PyObject *d = PyTuple_GET_ITEM(destinations, i);
        writes_arguments |= d != Py_None;
        in_range &= d == Py_None || (PyLong_Check(d) && (size_t)PyLong_AsSsize_t(d) < (size_t)num_arguments);
        PyTuple_SET_ITEM(outputs, i, Py_NewRef(d == Py_None ? PyTuple_GET_ITEM(self->outputs, i) : d));
    }
    if (!in_range) {
        Py_DECREF(outputs);
        return PyErr_Format(PyExc_IndexError, "destinations are %R, expected None or indices below %zd", destinations,
                            num_arguments);
    }
    PreparedCall *other =
        (PreparedCall *)new_prepared_call(Py_TYPE(self), self->descriptions, self->num_inputs, outputs, unpack);
    Py_DECREF(outputs);
    if (!other) return NULL;
    other->num_arguments = num_arguments;
    other->writes_arguments = writes_arguments;
    for (Py_ssize_t i = 0; i < other->num_inputs; i++) {
        long long offset;
        Source *source = &other->sources[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(sources, i), "nL", &source->argument, &offset))
            return Py_DECREF(other), NULL;
        source->offset = (uint64_t)offset;
        if (source->argument >= num_arguments) {
            Py_DECREF(other);
            return PyErr_Format(PyExc_IndexError, "sources are %R, expected indices below %zd", sources, num_arguments);
        }
    }
    return (PyObject *)other;
}

// An output is an argument (its index), a tensor without elements that every call returns, or an allocator to call.
static PyObject *make_output(PyObject *output, PyObject *const *arguments) {
    if (PyLong_Check(output)) return Py_NewRef(arguments[PyLong_AsSsize_t(output)]);
    return PyObject_TypeCheck(output, tensor_type) ? Py_NewRef(output) : PyObject_CallNoArgs(output);
}

static PyObject *make_outputs(PreparedCall *self, PyObject *const *arguments) {
    PyObject *made = PyTuple_New(self->num_outputs);
    for (Py_ssize_t i = 0; made && i < self->num_outputs; i++) {
        PyObject *output = make_output(PyTuple_GET_ITEM(self->outputs, i), arguments);
        if (!output) return Py_DECREF(made), NULL;
        PyTuple_SET_ITEM(made, i, output);
        DLTensor t;
        if (exchange->dltensor_from_py_object_no_sync(output, &t)) return Py_DECREF(made), NULL;
        self->pointers[self->num_inputs + i] = address_of(&t);
    }
    return made;
}

static CUresult encode_tensor_maps(Launch *launch) {
    static const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
    CUresult code = CUDA_SUCCESS;
    for (Py_ssize_t i = 0; i < launch->num_maps && code == CUDA_SUCCESS; i++) {
        TensorMap *m = &launch->maps[i];
        if (m->encoded_address == *m->address) continue;
        code = driver.encode(&m->map, m->type, m->rank, (void *)(uintptr_t)*m->address, m->sizes, m->strides, m->box,
                             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, m->swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        m->encoded_address = code == CUDA_SUCCESS ? *m->address : 0;
    }
    return code;
}

static bool launch_all(PreparedCall *self, CUstream stream) {
    CUresult code = CUDA_SUCCESS;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < self->num_launches && code == CUDA_SUCCESS; i++) {
        Launch *launch = &self->launches[i];
        launch->config.hStream = stream;
        code = encode_tensor_maps(launch);
        if (code == CUDA_SUCCESS) code = driver.launch(&launch->config, launch->function, launch->parameters, NULL);
    }
    Py_END_ALLOW_THREADS;
    if (code == CUDA_SUCCESS) return true;
    const char *reason = NULL;
    driver.describe(code, &reason);
    PyErr_Format(PyExc_RuntimeError, "CUDA driver: a kernel could not be launched: %s", reason ? reason : "unknown");
    return false;
}

// `addresses` of the tensor arguments, and the tensors themselves, which are used only if an output is one of them.
static PyObject *replay(PreparedCall *self, CUstream stream, const uint64_t *addresses, PyObject *const *arguments) {
    for (Py_ssize_t i = 0; i < self->num_inputs; i++) {
        Source source = self->sources[i];
        self->pointers[i] = (source.argument < 0 ? 0 : addresses[source.argument]) + source.offset;
    }
    PyObject *made = make_outputs(self, arguments);
    if (!made || !launch_all(self, stream)) return Py_XDECREF(made), NULL;
    if (!self->unpack) return made;
    PyObject *result = self->num_outputs ? Py_NewRef(PyTuple_GET_ITEM(made, 0)) : Py_NewRef(Py_None);
    Py_DECREF(made);
    return result;
}

static PyObject *PreparedCall_call(PreparedCall *self, PyObject *args, PyObject *kwargs) {
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count != 1 + self->num_arguments)
        return PyErr_Format(PyExc_TypeError, "%zd arguments given, expected a stream and %zd addresses", count,
                            self->num_arguments);
    if (self->writes_arguments)
        return PyErr_Format(PyExc_TypeError, "an output is one of the arguments; call with tensors, by a CallCache");
    uint64_t numbers[count];
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args, i));
        if (PyErr_Occurred()) return NULL;
    }
    return replay(self, (CUstream)(uintptr_t)numbers[0], numbers + 1, NULL);
}

static PyMethodDef prepared_call_methods[] = {
    {"rebind", (PyCFunction)PreparedCall_rebind, METH_VARARGS,
     "rebind(num_arguments, sources, destinations, unpack): the same launches for other tensor arguments\n\n"
     "sources       (index of an argument, bytes from its start) of each input, or (-1, address)\n"
     "destinations  index of the argument that each output is written to, None to allocate the output"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot prepared_call_slots[] = {
    {Py_tp_doc, "PreparedCall(launches, num_arguments, outputs, unpack)(stream, *addresses)\n\n"
                "The kernel launches of one call of an op. Calling it replays them on a stream, for the addresses of\n"
                "num_arguments tensors, and returns the outputs.\n\n"
                "launches  ((function, (x, y, z), threads, bytes of shared memory, PDL, parameters), ...). A\n"
                "          parameter is bytes; or the index of an argument or output, whose address it is; or, for a\n"
                "          tensor map, (address as one of these, type, swizzle, sizes, strides, box), as\n"
                "          cuTensorMapEncodeTiled takes them\n"
                "outputs   functions that allocate one each, or tensors without elements, which every call returns\n"
                "unpack    return the first output, or None if there is none, instead of a tuple of all"},
    {Py_tp_new, PreparedCall_new},
    {Py_tp_dealloc, PreparedCall_dealloc},
    {Py_tp_methods, prepared_call_methods},
    {Py_tp_call, PreparedCall_call},
    {0, NULL},
};
static PyType_Spec prepared_call_spec = {"attn_ops.eager.launch_cache.PreparedCall", sizeof(PreparedCall), 0,
                                         Py_TPFLAGS_DEFAULT, prepared_call_slots};
static PyTypeObject *prepared_call_type;

// ---- CallCache: the prepared calls of one op, or of a method around one, by cache key ----------------------------

typedef struct {
    PyObject_HEAD
    PyObject *entries, *grad_mode, *on_miss, *interposition_checks;
} CallCache;

static int CallCache_traverse(CallCache *self, visitproc visit, void *arg) {
    Py_VISIT(self->entries);
    Py_VISIT(self->grad_mode);
    Py_VISIT(self->on_miss);
    Py_VISIT(self->interposition_checks);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int CallCache_clear(CallCache *self) {
    Py_CLEAR(self->entries);
    Py_CLEAR(self->grad_mode);
    Py_CLEAR(self->on_miss);
    Py_CLEAR(self->interposition_checks);
    return 0;
}

static void CallCache_dealloc(CallCache *self) {
    PyObject_GC_UnTrack(self);
    CallCache_clear(self);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *CallCache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *entries, *grad_mode, *on_miss, *checks = NULL;
    if (!PyArg_ParseTuple(args, "O!OO|O!", &PyDict_Type, &entries, &grad_mode, &on_miss, &PyTuple_Type, &checks))
        return NULL;
    CallCache *self = (CallCache *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->entries = Py_NewRef(entries);
    self->grad_mode = Py_NewRef(grad_mode);
    self->on_miss = Py_NewRef(on_miss);
    self->interposition_checks = Py_XNewRef(checks);
    return (PyObject *)self;
}

enum { MAX_WORDS = 384, MAX_TENSORS = 64, MAX_OPTIONS = 2 * MAX_TENSORS };
enum Kind { OPTION, LIST, TUPLE, TENSOR };

// The arguments and the context of a call. The words, and the options as Python objects, are its cache key.
typedef struct {
    uint64_t words[MAX_WORDS], addresses[MAX_TENSORS], ends[MAX_TENSORS];  // bytes of the tensors
    PyObject *tensors[MAX_TENSORS];                                       // borrowed from the call, as options
    PyObject *options[MAX_OPTIONS];
    Py_ssize_t num_words, num_tensors, num_options;
    CUstream stream;
    bool grad_mode;
} Call;

// The add_ functions return whether the call can be cached so far; if not, an error may be set.

static bool add_word(Call *call, uint64_t word) {
    if (call->num_words == MAX_WORDS) return false;
    call->words[call->num_words++] = word;
    return true;
}

static bool add_option(Call *call, PyObject *option) {
    if (call->num_options == MAX_OPTIONS) return false;
    call->options[call->num_options++] = option;
    return add_word(call, OPTION);
}

// A list is a plan: the identity of its tensors is part of the key, so that launches may contain their addresses.
static bool add_list(Call *call, PyObject *list) {
    bool fits = add_word(call, LIST | (uint64_t)PyList_GET_SIZE(list) << 8);
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(list); i++)
        fits = add_word(call, (uintptr_t)PyList_GET_ITEM(list, i));
    return fits;
}

static bool add_tensor(Call *call, PyObject *tensor) {
    DLTensor t;
    if (call->num_tensors == MAX_TENSORS || exchange->dltensor_from_py_object_no_sync(tensor, &t)) return false;
    uint64_t address = address_of(&t), misaligned = address & 15, requires_grad = 0;  // launch_cache.py: ALIGNMENT_MASK
    uint64_t length = 1, empty = 0;
    for (int d = 0; d < t.ndim; d++) {
        length += (t.shape[d] - 1) * (t.strides ? t.strides[d] : 0);
        empty |= t.shape[d] == 0;
    }
    call->tensors[call->num_tensors] = tensor;
    call->ends[call->num_tensors] = address + (empty ? 0 : length * t.dtype.bits / 8);
    call->addresses[call->num_tensors++] = address;
    if (call->grad_mode) {
        PyObject *attribute = PyObject_GetAttr(tensor, str_requires_grad);
        if (!attribute) return false;
        requires_grad = attribute == Py_True;
        Py_DECREF(attribute);
    }
    uint64_t kind = TENSOR | (uint64_t)(uint8_t)t.ndim << 8 | (uint64_t)t.dtype.code << 16 |
                    (uint64_t)t.dtype.bits << 24 | misaligned << 32 | requires_grad << 36 |
                    (uint64_t)t.device.device_type << 40;
    bool fits = (t.strides || !t.ndim) && add_word(call, kind) && add_word(call, t.device.device_id);
    for (int d = 0; fits && d < t.ndim; d++) fits = add_word(call, t.shape[d]) && add_word(call, t.strides[d]);
    return fits;
}

static bool add_argument(CallCache *self, Call *call, PyObject *x) {
    if (Py_TYPE(x) == tensor_type || Py_TYPE(x) == parameter_type) return add_tensor(call, x);
    if (PyObject_TypeCheck(x, tensor_type)) return false;  // a subclass may override what the op does
    if (PyList_Check(x)) return !self->interposition_checks && add_list(call, x);
    if (!PyTuple_Check(x)) return add_option(call, x);
    bool fits = add_word(call, TUPLE | (uint64_t)PyTuple_GET_SIZE(x) << 8);
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(x); i++)
        fits = add_argument(self, call, PyTuple_GET_ITEM(x, i));
    return fits;
}

static bool is_interposed(CallCache *self) {
    Py_ssize_t count = self->interposition_checks ? PyTuple_GET_SIZE(self->interposition_checks) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *answer = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->interposition_checks, i));
        int interposed = answer ? PyObject_IsTrue(answer) : -1;
        Py_XDECREF(answer);
        if (interposed) return true;
    }
    return false;
}

static bool add_context(CallCache *self, Call *call) {
    CUdevice device;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    PyObject *grad_mode = PyObject_CallNoArgs(self->grad_mode);
    if (!grad_mode) return false;
    call->grad_mode = grad_mode == Py_True;
    Py_DECREF(grad_mode);
    if (driver.device(&device) != CUDA_SUCCESS) return false;  // a thread that has not used the GPU yet
    if (exchange->current_work_stream(kDLCUDA, device, (void **)&call->stream)) return false;
    driver.is_capturing(call->stream, &capturing);  // the launch will report an invalid stream
    return add_word(call, PyThread_get_thread_ident()) && add_word(call, device) &&
           add_word(call, (uint64_t)call->grad_mode << 1 | (capturing != CU_STREAM_CAPTURE_STATUS_NONE));
}

static bool add_call(CallCache *self, Call *call, PyObject *args, PyObject *kwargs) {
    PyObject *name, *value;
    if (is_interposed(self) || !add_context(self, call)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!add_argument(self, call, PyTuple_GET_ITEM(args, i))) return false;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value);)
        if (!add_option(call, name) || !add_argument(self, call, value)) return false;
    return true;
}

static PyObject *cache_key(const Call *call) {
    PyObject *words = PyBytes_FromStringAndSize((char *)call->words, call->num_words * sizeof(uint64_t));
    if (!words || !call->num_options) return words;
    PyObject *key = PyTuple_New(1 + call->num_options);
    if (!key) return Py_DECREF(words), NULL;
    PyTuple_SET_ITEM(key, 0, words);
    for (Py_ssize_t i = 0; i < call->num_options; i++) PyTuple_SET_ITEM(key, 1 + i, Py_NewRef(call->options[i]));
    return key;
}

// Whether an argument that an output is written to overlaps another argument in memory.
static bool output_overlaps(const PreparedCall *prepared, const Call *call) {
    for (Py_ssize_t i = 0; prepared->writes_arguments && i < prepared->num_outputs; i++) {
        PyObject *output = PyTuple_GET_ITEM(prepared->outputs, i);
        if (!PyLong_Check(output)) continue;
        Py_ssize_t o = PyLong_AsSsize_t(output);
        for (Py_ssize_t j = 0; j < call->num_tensors; j++)
            if (j != o && call->addresses[j] < call->ends[o] && call->addresses[o] < call->ends[j]) return true;
    }
    return false;
}

// The entry of a call, or NULL; and its key, or NULL if it cannot be cached. Sets no error.
static PyObject *lookup(CallCache *self, Call *call, PyObject *args, PyObject *kwargs, PyObject **key) {
    call->num_words = call->num_tensors = call->num_options = 0;
    *key = add_call(self, call, args, kwargs) ? cache_key(call) : NULL;
    PyObject *entry = *key ? Py_XNewRef(PyDict_GetItemWithError(self->entries, *key)) : NULL;
    if (PyErr_Occurred()) {  // also of an option that is not hashable
        PyErr_Clear();
        Py_CLEAR(*key);
    }
    return entry;
}

static PyObject *CallCache_call(CallCache *self, PyObject *args, PyObject *keywords) {
    PyObject *kwargs = keywords ? Py_NewRef(keywords) : PyDict_New(), *key, *result;
    if (!kwargs) return NULL;
    Call call;
    PyObject *entry = lookup(self, &call, args, kwargs, &key);
    bool prepared = entry && PyObject_TypeCheck(entry, prepared_call_type);
    if (prepared && output_overlaps((PreparedCall *)entry, &call))
        result = PyObject_CallFunctionObjArgs(self->on_miss, Py_None, args, kwargs, NULL);
    else if (prepared)
        result = replay((PreparedCall *)entry, call.stream, call.addresses, call.tensors);
    else if (!entry)
        result = PyObject_CallFunctionObjArgs(self->on_miss, key ? key : Py_None, args, kwargs, NULL);
    else
        result = PyObject_Call(entry, args, kwargs);
    Py_XDECREF(entry);
    Py_XDECREF(key);
    Py_DECREF(kwargs);
    return result;
}

static PyObject *CallCache_lookup(CallCache *self, PyObject *args, PyObject *keywords) {
    PyObject *kwargs = keywords ? Py_NewRef(keywords) : PyDict_New(), *key;
    if (!kwargs) return NULL;
    Call call;
    PyObject *entry = lookup(self, &call, args, kwargs, &key);
    Py_XDECREF(key);
    Py_DECREF(kwargs);
    return entry ? entry : Py_NewRef(Py_None);
}

static PyMethodDef call_cache_methods[] = {
    {"lookup", (PyCFunction)(void (*)(void))CallCache_lookup, METH_VARARGS | METH_KEYWORDS,
     "lookup(*args, **kwargs): the entry of such a call, or None"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot call_cache_slots[] = {
    {Py_tp_doc, "CallCache(entries, grad_mode, on_miss, interposition_checks)(*args, **kwargs)\n\n"
                "Makes a call by its entry in the cache. The caller inserts and evicts entries.\n\n"
                "entries    {cache key: PreparedCall, or a function to call with the arguments}\n"
                "grad_mode  grad_mode(): part of every key\n"
                "on_miss    on_miss(key, args, kwargs) makes a call without an entry; key is None if the call cannot\n"
                "           be cached\n"
                "interposition_checks\n"
                "           for a method: functions. If any returns true, a mode, transform or profiler must observe\n"
                "           the op, and the call misses. Calls with lists, which are the plans of an op, miss too"},
    {Py_tp_new, CallCache_new},
    {Py_tp_dealloc, CallCache_dealloc},
    {Py_tp_traverse, CallCache_traverse},
    {Py_tp_clear, CallCache_clear},
    {Py_tp_methods, call_cache_methods},
    {Py_tp_call, CallCache_call},
    {0, NULL},
};
static PyType_Spec call_cache_spec = {"attn_ops.eager.launch_cache.CallCache", sizeof(CallCache), 0,
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, call_cache_slots};

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
    return PyErr_Format(PyExc_OSError, "%s cannot be loaded, or is not a driver for CUDA 12", name);
}

static PyMethodDef functions[] = {
    {"connect", connect, METH_O, "connect(path): launch kernels through the CUDA driver library at `path`"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "launch_cache", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_launch_cache(void) {
    PyObject *torch = PyImport_ImportModule("torch"), *module = PyModule_Create(&definition);
    PyObject *prepared_call = PyType_FromSpec(&prepared_call_spec), *call_cache = PyType_FromSpec(&call_cache_spec);
    if (!torch || !module || !prepared_call || !call_cache) return NULL;
    prepared_call_type = (PyTypeObject *)prepared_call;
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
        return PyErr_SetString(PyExc_ImportError, "torch has a version of DLPack other than that of its header"), NULL;
    if (PyModule_AddObject(module, "PreparedCall", prepared_call)) return NULL;
    return PyModule_AddObject(module, "CallCache", call_cache) ? NULL : module;
}
