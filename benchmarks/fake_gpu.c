/* A fake CUDA driver: the part of CUDA's runtime, driver and cuBLAS that torch and Triton need to run without a GPU.
   Memory is reserved (pages are allocated when touched), kernels do not run, small copies are made, and the capture of
   a CUDA graph begins and ends. Functions that are not here return 0 (fake_gpu.py generates stubs for them). */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OK return 0
enum { DEVICE = 1, HOST = 2, MAX_ALLOCATIONS = 1 << 18, MAX_COPY = 4 << 20, MAX_SET = 1 << 16 };
static struct { char *start; size_t size; int kind; } allocations[MAX_ALLOCATIONS];
static int count;
static size_t allocated;
static long handle = 1024;
static cudaStream_t capturing = (cudaStream_t)-1;
static unsigned long long captures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Memory */
static int add_allocation(void *start, size_t size, int kind) {
  pthread_mutex_lock(&lock);
  int full = count == MAX_ALLOCATIONS;
  if (!full) {
    allocations[count].start = start; allocations[count].size = size; allocations[count++].kind = kind;
    allocated += kind == DEVICE ? size : 0;
  }
  pthread_mutex_unlock(&lock);
  return full ? 2 : 0;
}
static size_t remove_allocation(void *start) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count && !size; i++)
    if (allocations[i].start == start) {
      size = allocations[i].size;
      allocated -= allocations[i].kind == DEVICE ? size : 0;
      allocations[i] = allocations[--count];
    }
  pthread_mutex_unlock(&lock);
  return size;
}
static int allocate(void **p, size_t size, int kind) {
  *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) { *p = 0; return 2; }
  return add_allocation(*p, size, kind);
}
static int release(void *p) { size_t size = p ? remove_allocation(p) : 0; if (size) munmap(p, size); OK; }
cudaError_t cudaMalloc(void **p, size_t size) {
  if (allocated + size > MEMORY_BYTES) { *p = 0; return cudaErrorMemoryAllocation; }
  return allocate(p, size, DEVICE);
}
cudaError_t cudaFree(void *p) { return release(p); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return allocate(p, size, HOST); }
cudaError_t cudaFreeHost(void *p) { return release(p); }
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { return add_allocation(p, size, HOST); }
cudaError_t cudaHostUnregister(void *p) { remove_allocation(p); OK; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *all = MEMORY_BYTES; *left = *all - allocated; OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->devicePointer = a->hostPointer = (void *)p;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count; i++)
    if ((char *)p >= allocations[i].start && (char *)p < allocations[i].start + allocations[i].size)
      a->type = allocations[i].kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  pthread_mutex_unlock(&lock);
  OK;
}
static int copy(void *to, const void *from, size_t size) { if (size <= MAX_COPY) memmove(to, from, size); OK; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind k) { return copy(to, from, size); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind k, cudaStream_t s) {
  return copy(to, from, size);
}
cudaError_t cudaMemset(void *p, int value, size_t size) { if (size <= MAX_SET) memset(p, value, size); OK; }
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
  OK;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { return attribute(value, which); }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->totalGlobalMem = MEMORY_BYTES;
  p->major = 9; p->multiProcessorCount = 132; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->l2CacheSize = 60 << 20;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  OK;
}
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; OK; }
cudaError_t cudaGetDevice(int *device) { *device = 0; OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; OK; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int size, size_t shared, unsigned flags) { *n = 2; OK; }
const char *cudaGetErrorName(cudaError_t e) { return "fake"; }
const char *cudaGetErrorString(cudaError_t e) { return "error of the fake GPU"; }
void **__cudaRegisterFatBinary(void *binary) { static void *kept[1]; return kept; }

/* Streams, events and graphs */
#define NEW_HANDLE(p) (*(p) = (void *)(handle += 16))
cudaError_t cudaStreamCreate(cudaStream_t *s) { NEW_HANDLE(s); OK; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { NEW_HANDLE(s); OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; OK; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { NEW_HANDLE(e); OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { NEW_HANDLE(e); OK; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; OK; }
static enum cudaStreamCaptureStatus status(cudaStream_t s) {
  return s == capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { capturing = s; captures++; OK; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { capturing = (cudaStream_t)-1; NEW_HANDLE(g); OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *is) { *is = status(s); OK; }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, enum cudaStreamCaptureStatus *is, unsigned long long *id, cudaGraph_t *g,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  if (is) *is = status(s);
  if (id) *id = captures;
  if (g) *g = (cudaGraph_t)16;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (n) *n = 0;
  OK;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { NEW_HANDLE(e); OK; }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; OK; }
static int no_op(void) { OK; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
  *function = (void *)no_op;
  if (found) *found = cudaDriverEntryPointSuccess;
  OK;
}

/* cuBLAS: functions whose results are read */
int cublasCreate_v2(void **h) { *h = malloc(512); OK; }
int cublasLtMatmulDescCreate(void **h) { *h = malloc(512); OK; }
int cublasLtMatmulPreferenceCreate(void **h) { *h = malloc(512); OK; }
int cublasLtMatrixLayoutCreate(void **h) { *h = malloc(512); OK; }
int cublasLtMatmulAlgoGetHeuristic(
    void *h, void *d, void *a, void *b, void *c, void *e, void *f, int wanted, void *results, int *found) {
  memset(results, 0, 64); *found = 1; OK;
}
int cublasGetMathMode(void *h, int *mode) { *mode = 0; OK; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; OK; }
size_t cublasLtGetVersion(void) { return 130000; }

/* The driver, which Triton calls */
int cuDeviceGet(int *device, int which) { *device = 0; OK; }
int cuDeviceGetCount(int *n) { *n = 1; OK; }
int cuDriverGetVersion(int *version) { *version = 13000; OK; }
int cuDeviceGetAttribute(int *value, int which, int device) { return attribute(value, which); }
int cuCtxGetCurrent(void **context) { *context = (void *)16; OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; OK; }
int cuGetErrorString(int error, const char **text) { *text = "error of the fake GPU"; OK; }
int cuModuleLoadData(void **module, const void *image) { NEW_HANDLE(module); OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) { NEW_HANDLE(function); OK; }
int cuFuncGetAttribute(int *value, int which, void *function) { *value = which == 0 ? 1024 : 0; OK; }
