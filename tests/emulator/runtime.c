/* The CUDA runtime and driver, as far as torch asks them, over the host's memory: what is done on a stream is done at
   once, but has passed only when the host has waited for it (`order.h`); a captured graph is a number whose contents
   `operators.cpp` keeps. Built by `build.py` as libcudart.so, which is preloaded, and as libcuda.so.1. What the host
   must not do while a graph is captured ends the process, with one line. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hooks.h"

#define MEMORY ((size_t)80 << 30)
#define ALIGNMENT 512
#define PAGE 4096

static uintptr_t last_number = 15; /* of streams, events and graphs; low numbers are streams with a meaning */
static size_t used;

static void *number(void) { return (void *)++last_number; }

static size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static const struct EmulatorHooks *hooks;

void emulator_hooks(const struct EmulatorHooks *given) { hooks = given; }

#define TELL(name, ...) \
    if (hooks) hooks->name(__VA_ARGS__)

/* ---- capture ---- */

static cudaStream_t captured; /* the stream that is captured; 0: none */

int emulator_is_capturing(void) { return captured != 0; }

static cudaError_t allowed(const char *call, int is_forbidden) {
    if (!captured || !is_forbidden) return cudaSuccess;
    fprintf(stderr, "emulator: %s while a graph is captured\n", call);
    abort();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    captured = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = number();
    captured = 0;
    TELL(end_capture, (uint64_t)*graph, (uint64_t)stream);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captured && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = (unsigned long long)captured;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    TELL(launch_graph, (uint64_t)graph, (uint64_t)stream);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 1; /* torch warns of graphs without nodes */
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }

static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode, *mode = before;
    return cudaSuccess;
}

/* ---- memory ---- */

static struct { char *at; size_t size; } pinned[1 << 16];
static size_t pins;

cudaError_t cudaMalloc(void **memory, size_t size) {
    allowed("cudaMalloc", thread_mode != cudaStreamCaptureModeRelaxed); /* torch relaxes it for pools of graphs */
    if (used + size > MEMORY) return cudaErrorMemoryAllocation;
    *memory = aligned_alloc(ALIGNMENT, rounded(size, ALIGNMENT));
    if (!*memory) return cudaErrorMemoryAllocation;
    memset(*memory, 0xff, size); /* NaN in every floating-point type, -1 in integers */
    used += size;
    TELL(new_memory, *memory, size);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    allowed("cudaFree", memory != 0);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = MEMORY, *free_bytes = MEMORY - used;
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags) {
    if (pins == sizeof(pinned) / sizeof(*pinned)) return cudaErrorMemoryAllocation;
    pinned[pins].at = memory, pinned[pins++].size = size;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *memory) {
    for (size_t i = 0; i < pins; i++)
        if (pinned[i].at == memory) {
            TELL(unpinned, memory, pinned[i].size);
            pinned[i] = pinned[--pins];
        }
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
    *memory = aligned_alloc(PAGE, rounded(size, PAGE));
    return *memory ? cudaHostRegister(*memory, rounded(size, PAGE), 0) : cudaErrorMemoryAllocation;
}

cudaError_t cudaMallocHost(void **memory, size_t size) { return cudaHostAlloc(memory, size, 0); }

cudaError_t cudaFreeHost(void *memory) {
    cudaHostUnregister(memory);
    free(memory);
    return cudaSuccess;
}

/* The pinned memory of which an address is a part; 0: it is not pinned. */
int emulator_pinned_range(const void *memory, uintptr_t *begin, uintptr_t *end) {
    for (size_t i = 0; i < pins; i++) {
        *begin = (uintptr_t)pinned[i].at, *end = *begin + pinned[i].size;
        if ((uintptr_t)memory >= *begin && (uintptr_t)memory < *end) return 1;
    }
    return 0;
}

int emulator_is_pinned(const void *memory) {
    uintptr_t begin, end;
    return emulator_pinned_range(memory, &begin, &end);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    if (emulator_is_pinned(pointer)) attributes->type = cudaMemoryTypeHost;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    allowed("cudaMemcpy", 1);
    memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind != cudaMemcpyHostToDevice) TELL(access, "cudaMemcpyAsync", from, size, 0, (uint64_t)stream);
    if (kind != cudaMemcpyDeviceToHost) TELL(access, "cudaMemcpyAsync", to, size, 1, (uint64_t)stream);
    memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *memory, int value, size_t size) {
    memset(memory, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) {
    TELL(access, "cudaMemsetAsync", memory, size, 1, (uint64_t)stream);
    return cudaMemset(memory, value, size);
}

/* ---- streams and events ---- */

cudaError_t cudaDeviceSynchronize(void) {
    allowed("cudaDeviceSynchronize", 1);
    TELL(host_waits_for_device);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    allowed("cudaStreamSynchronize", stream == captured);
    TELL(host_waits_for_stream, (uint64_t)stream);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    allowed("cudaEventSynchronize", 1);
    TELL(host_waits_for_event, (uint64_t)event);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    allowed("cudaStreamQuery", stream == captured);
    return hooks && !hooks->stream_has_passed((uint64_t)stream) ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return hooks && !hooks->event_has_passed((uint64_t)event) ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    TELL(wait_for_event, (uint64_t)stream, (uint64_t)event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    TELL(record_event, (uint64_t)event, (uint64_t)stream);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = number();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = number();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 0.001f;
    return cudaSuccess;
}

/* ---- the device: one H100 ---- */

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "Emulated H100");
    properties->totalGlobalMem = MEMORY;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->regsPerBlock = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
             : attribute == cudaDevAttrMultiProcessorCount  ? 132
                                                            : 0;
    return cudaSuccess;
}

static cudaError_t answer(int *place, int value) {
    *place = value;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) { return answer(count, 1); }
cudaError_t cudaGetDevice(int *device) { return answer(device, 0); }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return answer(version, CUDART_VERSION); }
cudaError_t cudaRuntimeGetVersion(int *version) { return answer(version, CUDART_VERSION); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return answer(can, 0); }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    answer(least, 0);
    return answer(greatest, -5);
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
    *function = 0;
    if (found) *found = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "emulated";
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0, *is_active = 1;
    return CUDA_SUCCESS;
}

/* A kernel that torch launches itself would have been computed by no one. */
cudaError_t cudaLaunchKernel(
    const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    fprintf(stderr, "emulator: torch launches a kernel of its own\n");
    return cudaErrorInvalidDeviceFunction;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return cudaLaunchKernel(kernel, (dim3){0}, (dim3){0}, arguments, 0, 0);
}
