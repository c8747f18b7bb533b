// A fake libcuda for the native launcher: it records what it is asked, in variables and, if FAKE_LIBCUDA_LOG names a
// file, in that file, one line per launch and one per unloaded module. The variables that start with answer_ are what it
// answers. Compiled with -DcuName=absent, it has no such function.
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int answer_version = 13000, answer_major = 9, answer_minor = 0;
int answer_retain, answer_push, answer_load, answer_unload, answer_function, answer_encode, answer_launch;
int loads, unloads, wrong_unloads, launches, maps, pushes, pops, retained, retained_device, max_shared, relaxed;
static char loaded[1024];  // by number of the module: whether it is
unsigned grid[3], threads, shared, num_attributes, cluster[3], pdl;
void *stream, *function;
unsigned char values[128][8];
int sizes[128];  // bytes of each parameter, set by a test
long long map[24];
int device, answer_device, capturing;
int echo;  // write the first parameter to where the second points
static __thread CUcontext stack[4] = {0};
static __thread int depth;

static void write_log(const char *line) {
  const char *log = getenv("FAKE_LIBCUDA_LOG");
  if (!log) return;
  FILE *file = fopen(log, "a");
  fputs(line, file);
  fclose(file);
}

CUresult cuDriverGetVersion(int *v) { *v = answer_version; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "as set by the test"; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  *v = a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? answer_major : answer_minor;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  *c = (CUcontext)(uintptr_t)(100 + d);
  retained_device = d, retained += !answer_retain;
  return answer_retain;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { retained--; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = depth ? stack[depth - 1] : 0; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = device; return answer_device; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) { *status = capturing; return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext c) {
  if (answer_push) return answer_push;
  stack[depth++] = c;
  __sync_fetch_and_add(&pushes, 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *c) { *c = stack[--depth]; __sync_fetch_and_add(&pops, 1); return CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *m) {
  static __thread CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  CUstreamCaptureMode old = mode;
  mode = *m, *m = old, relaxed = mode == CU_STREAM_CAPTURE_MODE_RELAXED;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *m, const void *image) {
  if (!depth || !relaxed) return CUDA_ERROR_INVALID_CONTEXT;
  *m = (CUmodule)(uintptr_t)++loads;
  loaded[loads] = !answer_load;
  return answer_load;
}
CUresult cuModuleUnload(CUmodule m) {
  const uintptr_t number = (uintptr_t)m;
  wrong_unloads += !depth || !relaxed || number >= sizeof loaded || !loaded[number];
  unloads++, loaded[number % sizeof loaded] = 0;
  write_log("unload\n");
  return answer_unload;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  *f = (CUfunction)m;
  return answer_function;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { max_shared = v; return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                const cuuint32_t *step, CUtensorMapInterleave i, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion p, CUtensorMapFloatOOBfill fill) {
  map[0] = type, map[1] = swizzle, map[2] = rank;
  for (unsigned d = 0; d < rank; d++) map[3 + d] = size[d], map[8 + d] = d ? stride[d - 1] : 0, map[13 + d] = box[d];
  maps++;
  memset(m, 0, sizeof *m);
  memcpy(m, &address, sizeof address);
  return (uintptr_t)m % 64 || step[rank - 1] != 1 ? CUDA_ERROR_INVALID_VALUE : answer_encode;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) {
  if (!depth || extra) return CUDA_ERROR_INVALID_CONTEXT;
  grid[0] = c->gridDimX, grid[1] = c->gridDimY, grid[2] = c->gridDimZ;
  threads = c->blockDimX, shared = c->sharedMemBytes, stream = c->hStream, function = f;
  num_attributes = c->numAttrs, pdl = 0, cluster[0] = cluster[1] = cluster[2] = 1;
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const CUlaunchAttribute *a = &c->attrs[i];
    if (a->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      pdl = a->value.programmaticStreamSerializationAllowed;
    if (a->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      cluster[0] = a->value.clusterDim.x, cluster[1] = a->value.clusterDim.y, cluster[2] = a->value.clusterDim.z;
  }
  for (int i = 0; i < 128; i++)
    if (sizes[i]) memcpy(values[i], p[i], sizes[i]);
  if (echo) usleep(50), **(void ***)p[1] = *(void **)p[0];  // other threads launch meanwhile
  __sync_fetch_and_add(&launches, 1);
  char line[128];
  snprintf(line, sizeof line, "%u %u %u %u %u %u %d\n", grid[0], grid[1], grid[2], threads, shared, pdl, maps);
  write_log(line);
  return answer_launch;
}
