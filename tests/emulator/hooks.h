/* What the runtime (C) tells of its streams and memory to the checks (C++). */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct EmulatorHooks {
    void (*end_capture)(uint64_t graph, uint64_t stream);
    void (*launch_graph)(uint64_t graph, uint64_t stream);
    void (*record_event)(uint64_t event, uint64_t stream);
    void (*wait_for_event)(uint64_t stream, uint64_t event);
    void (*host_waits_for_stream)(uint64_t stream);
    void (*host_waits_for_event)(uint64_t event);
    void (*host_waits_for_device)(void);
    int (*stream_has_passed)(uint64_t stream);
    int (*event_has_passed)(uint64_t event);
    void (*access)(const char *call, const void *memory, size_t size, int writes, uint64_t stream);
    void (*new_memory)(const void *memory, size_t size);   /* of the device */
    void (*unpinned)(const void *memory, size_t size);     /* of the host */
};
