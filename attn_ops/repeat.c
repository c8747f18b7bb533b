// Finds a call like an earlier one and makes its launches again: what attn_ops/repeat.py remembers, without the
// interpreter. Built by Triton's own means for the helpers that it compiles on a user's machine.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>

static PyTypeObject *tensor_type;
static PyObject *str_data_ptr, *str_shape;

static struct {
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);
    CUresult (*describe)(CUresult, const char **);
} driver;

static bool address_of(PyObject *tensor, uint64_t *address) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
    if (!number) return false;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

// ---- Repeat: the launches of a call, and its outputs -------------------------------------------------------------

typedef struct {
    CUlaunchConfig config;
    CUlaunchAttribute early;
    CUfunction function;
    void **parameters;
} Launch;

typedef struct {
    PyObject_HEAD
    PyObject *outputs, *kept;  // `kept` owns the bytes that parameters point at
    bool unpack;
    Py_ssize_t num_given, num_outputs, num_launches;
    uint64_t *cells;  // addresses of the tensors given, then of the outputs: kernels read them from here
    Launch *launches;
} Repeat;

static void Repeat_dealloc(Repeat *self) {
    for (Py_ssize_t i = 0; self->launches && i < self->num_launches; i++) PyMem_Free(self->launches[i].parameters);
    PyMem_Free(self->launches);
    PyMem_Free(self->cells);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->kept);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
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
    Py_ssize_t size = PyTuple_GET_SIZE(parameters), num_cells = self->num_given + self->num_outputs;
    launch->parameters = PyMem_Calloc(size + 1, sizeof(void *));
    if (!launch->parameters) return PyErr_NoMemory(), false;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *parameter = PyTuple_GET_ITEM(parameters, i);
        if (PyBytes_Check(parameter)) {
            launch->parameters[i] = PyBytes_AS_STRING(parameter);
            continue;
        }
        Py_ssize_t cell = PyLong_AsSsize_t(parameter);
        if (PyErr_Occurred()) return false;
        if (cell < 0 || cell >= num_cells) return PyErr_SetString(PyExc_IndexError, "a cell that is not there"), false;
        launch->parameters[i] = &self->cells[cell];
    }
    return true;
}

static PyObject *Repeat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *launches, *outputs;
    Py_ssize_t num_given;
    int unpack;
    if (!PyArg_ParseTuple(args, "O!nO!p", &PyTuple_Type, &launches, &num_given, &PyTuple_Type, &outputs, &unpack))
        return NULL;
    Repeat *self = (Repeat *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->outputs = Py_NewRef(outputs);
    self->kept = Py_NewRef(launches);
    self->unpack = unpack;
    self->num_given = num_given;
    self->num_outputs = PyTuple_GET_SIZE(outputs);
    self->cells = PyMem_Calloc(num_given + self->num_outputs + 1, sizeof(uint64_t));
    self->launches = PyMem_Calloc(PyTuple_GET_SIZE(launches) + 1, sizeof(Launch));
    self->num_launches = PyTuple_GET_SIZE(launches);
    if (!self->cells || !self->launches) return PyErr_NoMemory(), Py_DECREF(self), NULL;
    for (Py_ssize_t i = 0; i < self->num_launches; i++)
        if (!lay_out(self, &self->launches[i], PyTuple_GET_ITEM(launches, i))) return Py_DECREF(self), NULL;
    return (PyObject *)self;
}

static PyObject *make_outputs(Repeat *self) {
    PyObject *made = PyTuple_New(self->num_outputs);
    for (Py_ssize_t i = 0; made && i < self->num_outputs; i++) {
        PyObject *output = PyTuple_GET_ITEM(self->outputs, i);
        output = PyObject_TypeCheck(output, tensor_type) ? Py_NewRef(output) : PyObject_CallNoArgs(output);
        if (!output) return Py_DECREF(made), NULL;
        PyTuple_SET_ITEM(made, i, output);
        if (!address_of(output, &self->cells[self->num_given + i])) return Py_DECREF(made), NULL;
    }
    return made;
}

static bool launch_all(Repeat *self, CUstream stream) {
    CUresult code = CUDA_SUCCESS;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < self->num_launches && code == CUDA_SUCCESS; i++) {
        Launch *launch = &self->launches[i];
        launch->config.hStream = stream;
        code = driver.launch(&launch->config, launch->function, launch->parameters, NULL);
    }
    Py_END_ALLOW_THREADS;
    if (code == CUDA_SUCCESS) return true;
    const char *reason = NULL;
    driver.describe(code, &reason);
    PyErr_Format(PyExc_RuntimeError, "CUDA driver: a kernel could not be launched: %s", reason ? reason : "unknown");
    return false;
}

static PyObject *run(Repeat *self, CUstream stream, const uint64_t *addresses) {
    memcpy(self->cells, addresses, self->num_given * sizeof(uint64_t));
    PyObject *made = make_outputs(self);
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
    uint64_t numbers[count];
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args, i));
        if (PyErr_Occurred()) return NULL;
    }
    return run(self, (CUstream)(uintptr_t)numbers[0], numbers + 1);
}

static PyType_Slot repeat_slots[] = {
    {Py_tp_doc, "Repeat(launches, num_given, outputs, unpack)(stream, *addresses)\n\n"
                "launches  ((function, (x, y, z), threads, shared, early, parameters), ...), a parameter being bytes or the\n"
                "          number of a tensor given or made, whose address it is\n"
                "outputs   functions that allocate one each, or tensors without elements, the same every time\n"
                "unpack    return the first output, or None, instead of a tuple of all"},
    {Py_tp_new, Repeat_new},
    {Py_tp_dealloc, Repeat_dealloc},
    {Py_tp_call, Repeat_call},
    {0, NULL},
};
static PyType_Spec repeat_spec = {"attn_ops.repeat.Repeat", sizeof(Repeat), 0, Py_TPFLAGS_DEFAULT, repeat_slots};
static PyTypeObject *repeat_type;

// ---- Calls: those of one op that are remembered ------------------------------------------------------------------

typedef struct {
    PyObject_HEAD
    PyObject *calls, *device, *stream, *grad_mode, *first;
} Calls;

static int Calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(self->calls);
    Py_VISIT(self->device);
    Py_VISIT(self->stream);
    Py_VISIT(self->grad_mode);
    Py_VISIT(self->first);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Calls_clear(Calls *self) {
    Py_CLEAR(self->calls);
    Py_CLEAR(self->device);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->grad_mode);
    Py_CLEAR(self->first);
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
    PyObject *calls, *device, *stream, *grad_mode, *first;
    if (!PyArg_ParseTuple(args, "O!OOOO", &PyDict_Type, &calls, &device, &stream, &grad_mode, &first)) return NULL;
    Calls *self = (Calls *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->calls = Py_NewRef(calls);
    self->device = Py_NewRef(device);
    self->stream = Py_NewRef(stream);
    self->grad_mode = Py_NewRef(grad_mode);
    self->first = Py_NewRef(first);
    return (PyObject *)self;
}

typedef struct {
    PyObject **tensors;  // those of the call, borrowed
    uint64_t *addresses, together;
    PyObject **options;  // what else it was given, borrowed
    uint64_t *held;      // the identity of tensors in lists
    Py_ssize_t num_tensors, num_options, num_held;
    PyObject *device;  // owned
    CUstream stream;
} Call;

static Py_ssize_t list_size(PyObject *x) { return PyList_Check(x) ? PyList_GET_SIZE(x) : 0; }

static bool read_argument(Call *call, PyObject *x) {
    PyObject *option = x;
    if (PyList_Check(x)) {
        option = (PyObject *)&PyList_Type;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(x); i++)
            call->held[call->num_held++] = (uintptr_t)PyList_GET_ITEM(x, i);
    } else if (PyObject_TypeCheck(x, tensor_type)) {
        option = (PyObject *)tensor_type;
        uint64_t *address = &call->addresses[call->num_tensors];
        if (!address_of(x, address)) return false;
        call->together |= *address;
        call->tensors[call->num_tensors++] = x;
    }
    call->options[call->num_options++] = option;
    return true;
}

static bool read_call(Calls *self, Call *call, PyObject *args, PyObject *kwargs) {
    PyObject *name, *value, *stream;
    call->device = PyObject_CallNoArgs(self->device);
    stream = call->device ? PyObject_CallOneArg(self->stream, call->device) : NULL;
    if (!stream) return false;
    call->stream = PyLong_AsVoidPtr(stream);
    Py_DECREF(stream);
    if (PyErr_Occurred()) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!read_argument(call, PyTuple_GET_ITEM(args, i))) return false;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value);) {
        call->options[call->num_options++] = name;
        if (!read_argument(call, value)) return false;
    }
    return true;
}

// All that a call shares with those like it, but what guards check of its tensors.
static PyObject *key_of(Calls *self, Call *call) {
    Py_ssize_t at = 0;
    PyObject *key = PyTuple_New(4 + call->num_options);
    if (!key) return NULL;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    driver.is_capturing(call->stream, &capturing);  // what is wrong with the stream, the launch will say
    call->held[call->num_held++] = capturing != CU_STREAM_CAPTURE_STATUS_NONE;
    call->held[call->num_held++] = PyThread_get_thread_ident();
    call->held[call->num_held++] = call->together & 15;  // repeat.py's ALIGNMENT
    PyTuple_SET_ITEM(key, at++, PyBytes_FromStringAndSize((char *)call->held, call->num_held * sizeof(uint64_t)));
    PyTuple_SET_ITEM(key, at++,
                     call->num_tensors ? PyObject_GetAttr(call->tensors[0], str_shape) : Py_NewRef(Py_None));
    PyTuple_SET_ITEM(key, at++, Py_NewRef(call->device));
    PyTuple_SET_ITEM(key, at++, PyObject_CallNoArgs(self->grad_mode));
    for (Py_ssize_t i = 0; i < call->num_options; i++) PyTuple_SET_ITEM(key, at++, Py_NewRef(call->options[i]));
    if (PyErr_Occurred()) Py_CLEAR(key);
    return key;
}

// The repeat of an earlier call whose guards accept the tensors, as a new reference; NULL, perhaps with an error.
static Repeat *find(PyObject *alike, const Call *call) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(alike); i++) {
        PyObject *entry = Py_NewRef(PyList_GET_ITEM(alike, i));
        PyObject *accepted = PyObject_Vectorcall(PyTuple_GET_ITEM(entry, 0), call->tensors, call->num_tensors, NULL);
        PyObject *repeat = PyTuple_GET_ITEM(entry, 1);
        bool ours = PyObject_TypeCheck(repeat, repeat_type), failed = !accepted || !ours;
        if (!ours) PyErr_SetString(PyExc_TypeError, "a remembered call is not a Repeat");
        repeat = accepted == Py_True && ours ? Py_NewRef(repeat) : NULL;
        Py_XDECREF(accepted);
        Py_DECREF(entry);
        if (repeat || failed) return (Repeat *)repeat;
    }
    return NULL;
}

static PyObject *Calls_call(Calls *self, PyObject *args, PyObject *given) {
    PyObject *kwargs = given ? Py_NewRef(given) : PyDict_New();
    if (!kwargs) return NULL;
    Py_ssize_t num_args = PyTuple_GET_SIZE(args) + PyDict_GET_SIZE(kwargs), num_held = 3;
    PyObject *name, *value;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) num_held += list_size(PyTuple_GET_ITEM(args, i));
    for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value);) num_held += list_size(value);
    PyObject *tensors[num_args + 1], *options[2 * num_args + 1], *result = NULL;
    uint64_t addresses[num_args + 1], held[num_held];
    Call call = {.tensors = tensors, .addresses = addresses, .options = options, .held = held};
    PyObject *key = read_call(self, &call, args, kwargs) ? key_of(self, &call) : NULL;
    PyObject *alike = key ? PyDict_GetItemWithError(self->calls, key) : NULL;
    Repeat *repeat = NULL;
    if (alike) {
        Py_INCREF(alike);
        repeat = find(alike, &call);
        Py_DECREF(alike);
    }
    if (repeat)
        result = run(repeat, call.stream, addresses);
    else if (!PyErr_Occurred())
        result = PyObject_CallFunctionObjArgs(self->first, key, args, kwargs, NULL);
    Py_XDECREF(repeat);
    Py_XDECREF(key);
    Py_XDECREF(call.device);
    Py_DECREF(kwargs);
    return result;
}

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "Calls(calls, device, stream, grad_mode, first)(*args, **kwargs)\n\n"
                "calls      {key: [(check, repeat), ...]}, filled by the caller\n"
                "device     device(): the current one\n"
                "stream     stream(device): the current one there\n"
                "grad_mode  grad_mode(): a part of every key\n"
                "first      first(key, args, kwargs) makes a call unlike every earlier one"},
    {Py_tp_new, Calls_new},
    {Py_tp_dealloc, Calls_dealloc},
    {Py_tp_traverse, Calls_traverse},
    {Py_tp_clear, Calls_clear},
    {Py_tp_call, Calls_call},
    {0, NULL},
};
static PyType_Spec calls_spec = {"attn_ops.repeat.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 calls_slots};

// ---- The module --------------------------------------------------------------------------------------------------

static PyObject *connect(PyObject *module, PyObject *path) {
    const char *name = PyUnicode_AsUTF8(path);
    void *library = name ? dlopen(name, RTLD_LAZY) : NULL;
    if (!name) return NULL;
    if (library) {
        *(void **)&driver.launch = dlsym(library, "cuLaunchKernelEx");
        *(void **)&driver.is_capturing = dlsym(library, "cuStreamIsCapturing");
        *(void **)&driver.describe = dlsym(library, "cuGetErrorString");
    }
    if (!library || !driver.launch || !driver.is_capturing || !driver.describe) return PyErr_SetString(PyExc_OSError, dlerror()), NULL;
    Py_RETURN_NONE;
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
    str_data_ptr = PyUnicode_InternFromString("data_ptr");
    str_shape = PyUnicode_InternFromString("shape");
    Py_DECREF(torch);
    if (!tensor_type || !str_data_ptr || !str_shape) return NULL;
    if (PyModule_AddObject(module, "Repeat", repeat) || PyModule_AddObject(module, "Calls", calls)) return NULL;
    return module;
}
