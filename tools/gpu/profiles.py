"""The time of kernels on the device, by torch's profiler."""

import torch
from torch.profiler import ProfilerActivity, profile


def start() -> profile:
    """A profiler that records kernels from now on, until its `stop`."""
    torch.cuda.synchronize()
    found = profile(activities=[ProfilerActivity.CUDA])
    found.start()
    return found


def kernels(found: profile, calls: int = 1, count: int = 10) -> dict:
    """Of a stopped profiler, by call: milliseconds that kernels ran, launches, and the kernels that took most of it."""
    events = [event for event in found.key_averages() if event.self_device_time_total > 0]  # of kernels and copies
    events.sort(key=lambda event: -event.self_device_time_total)
    slowest = {event.key[:70]: (round(event.self_device_time_total / 1e3 / calls, 3), round(event.count / calls, 1))
               for event in events[:count]}  # fmt: skip
    busy = sum(event.self_device_time_total for event in events) / 1e3 / calls
    return {"device_ms": round(busy, 3), "launches": round(sum(event.count for event in events) / calls),
            "kernels_ms_and_launches": slowest}  # fmt: skip
