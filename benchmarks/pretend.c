/* A GPU that does nothing: as much of CUDA's runtime, driver and cuBLAS as torch and Triton need to believe in one.
   Memory is given out (of addresses; pages come when touched), kernels are not run, small copies are made, a recording
   of a CUDA graph has a beginning and an end. What is not here returns 0 (pretend.py adds it, by name). */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define FINE return 0
enum { DEVICE = 1, HOST = 2, PLACES = 1 << 18, COPIED = 4 << 20, SET = 1 << 16 };
static struct { char *start; size_t size; int kind; } places[PLACES];
static int count;
static size_t taken;
static long handle = 1024;
static cudaStream_t recording = (cudaStream_t)-1;
static unsigned long long recordings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Memory */
static int note(void *start, size_t size, int kind) {
  pthread_mutex_lock(&lock);
  int full = count == PLACES;
  if (!full) {
    places[count].start = start; places[count].size = size; places[count++].kind = kind;
    taken += kind == DEVICE ? size : 0;
  }
  pthread_mutex_unlock(&lock);
  return full ? 2 : 0;
}
static size_t forget(void *start) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count && !size; i++)
    if (places[i].start == start) {
      size = places[i].size;
      taken -= places[i].kind == DEVICE ? size : 0;
      places[i] = places[--count];
    }
  pthread_mutex_unlock(&lock);
  return size;
}
static int give(void **p, size_t size, int kind) {
  *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) { *p = 0; return 2; }
  return note(*p, size, kind);
}
static int take(void *p) { size_t size = p ? forget(p) : 0; if (size) munmap(p, size); FINE; }
cudaError_t cudaMalloc(void **p, size_t size) {
  if (taken + size > PRETENDED_BYTES) { *p = 0; return cudaErrorMemoryAllocation; }
  return give(p, size, DEVICE);
}
cudaError_t cudaFree(void *p) { return take(p); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return give(p, size, HOST); }
cudaError_t cudaFreeHost(void *p) { return take(p); }
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { return note(p, size, HOST); }
cudaError_t cudaHostUnregister(void *p) { forget(p); FINE; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *all = PRETENDED_BYTES; *left = *all - taken; FINE; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->devicePointer = a->hostPointer = (void *)p;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count; i++)
    if ((char *)p >= places[i].start && (char *)p < places[i].start + places[i].size)
      a->type = places[i].kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  pthread_mutex_unlock(&lock);
  FINE;
}
static int copy(void *to, const void *from, size_t size) { if (size <= COPIED) memmove(to, from, size); FINE; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind k) { return copy(to, from, size); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind k, cudaStream_t s) {
  return copy(to, from, size);
}
cudaError_t cudaMemset(void *p, int value, size_t size) { if (size <= SET) memset(p, value, size); FINE; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t s) { return cudaMemset(p, value, size); }

/* The device: an H200 */
static int attribute(int *value, int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 0;
  }
  FINE;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { return attribute(value, which); }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->totalGlobalMem = PRETENDED_BYTES;
  p->major = 9; p->multiProcessorCount = 132; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->l2CacheSize = 60 << 20;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  FINE;
}
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; FINE; }
cudaError_t cudaGetDevice(int *device) { *device = 0; FINE; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; FINE; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; FINE; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; FINE; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; FINE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int size, size_t shared, unsigned flags) { *n = 2; FINE; }
const char *cudaGetErrorName(cudaError_t e) { return "pretended"; }
const char *cudaGetErrorString(cudaError_t e) { return "an error of the pretended GPU"; }
void **__cudaRegisterFatBinary(void *binary) { static void *kept[1]; return kept; }

/* Streams, events and graphs */
#define ANOTHER(p) (*(p) = (void *)(handle += 16))
cudaError_t cudaStreamCreate(cudaStream_t *s) { ANOTHER(s); FINE; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { ANOTHER(s); FINE; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; FINE; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { ANOTHER(e); FINE; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { ANOTHER(e); FINE; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; FINE; }
static enum cudaStreamCaptureStatus status(cudaStream_t s) {
  return s == recording ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { recording = s; recordings++; FINE; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { recording = (cudaStream_t)-1; ANOTHER(g); FINE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *is) { *is = status(s); FINE; }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, enum cudaStreamCaptureStatus *is, unsigned long long *id, cudaGraph_t *g,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  if (is) *is = status(s);
  if (id) *id = recordings;
  if (g) *g = (cudaGraph_t)16;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (n) *n = 0;
  FINE;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { ANOTHER(e); FINE; }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; FINE; }
static int nothing(void) { FINE; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
  *function = (void *)nothing;
  if (found) *found = cudaDriverEntryPointSuccess;
  FINE;
}

/* cuBLAS: what others ask for and look into */
int cublasCreate_v2(void **h) { *h = malloc(512); FINE; }
int cublasLtMatmulDescCreate(void **h) { *h = malloc(512); FINE; }
int cublasLtMatmulPreferenceCreate(void **h) { *h = malloc(512); FINE; }
int cublasLtMatrixLayoutCreate(void **h) { *h = malloc(512); FINE; }
int cublasLtMatmulAlgoGetHeuristic(
    void *h, void *d, void *a, void *b, void *c, void *e, void *f, int wanted, void *results, int *found) {
  memset(results, 0, 64); *found = 1; FINE;
}
int cublasGetMathMode(void *h, int *mode) { *mode = 0; FINE; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; FINE; }
size_t cublasLtGetVersion(void) { return 130000; }

/* The driver, which Triton asks */
int cuDeviceGet(int *device, int which) { *device = 0; FINE; }
int cuDeviceGetCount(int *n) { *n = 1; FINE; }
int cuDriverGetVersion(int *version) { *version = 13000; FINE; }
int cuDeviceGetAttribute(int *value, int which, int device) { return attribute(value, which); }
int cuCtxGetCurrent(void **context) { *context = (void *)16; FINE; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; FINE; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the pretended GPU"; FINE; }
int cuModuleLoadData(void **module, const void *image) { ANOTHER(module); FINE; }
int cuModuleGetFunction(void **function, void *module, const char *name) { ANOTHER(function); FINE; }
int cuFuncGetAttribute(int *value, int which, void *function) { *value = which == 0 ? 1024 : 0; FINE; }
