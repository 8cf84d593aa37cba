"""The cores that this process may use."""

import contextlib
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # CPU quota of the container: "quota period" in microseconds, or "max period"


def cores() -> int:
    """Cores that this process may use: its CPU affinity, limited by the quota of its container."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, QUOTA.read_text().split())
        return max(1, min(affinity, quota // period))
    return affinity
