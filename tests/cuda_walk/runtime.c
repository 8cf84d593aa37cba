/* Stands in for the CUDA runtime and driver where there is no device: torch asks them, before it looks at tensors without
   numbers, which device is current and which stream. Built by tests/cuda_walk/start.py as both libraries. */
#include <string.h>

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaGetDeviceProperties(char *properties, int device) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)1; return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)1; return 0; }
int cudaEventDestroy(void *event) { return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long flags, int *found) {
    *function = 0;
    if (found) *found = 1;
    return 0;
}
