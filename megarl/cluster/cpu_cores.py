"""The cores that this process may use: their number, and binding a rank to those of its device's NUMA node.

Host memory is on the node of the core that first touches it, or that has CUDA page-lock it, so the memory policy stays
as it is. Copies between a device and the memory of another socket are slower.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

SYS = Path("/sys")
QUOTA = SYS / "fs/cgroup/cpu.max"  # CPU quota of the container: "quota period" in microseconds, or "max period"
_unbound: set[int] | None = None  # cores of this process before it was bound


def cores() -> int:
    """Cores that this process may use: its CPU affinity, limited by the quota of its container."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, QUOTA.read_text().split())
        return max(1, min(affinity, quota // period))
    return affinity


def bind_to_device(index: int):
    """Binds all threads of this process to the cores of a CUDA device's NUMA node; memory follows by first touch.

    If several ranks of this machine share these cores, torch has at most this rank's share of them as threads. Nothing
    changes if the process may not use all cores of the machine, since the user or the launcher has bound it already,
    if all cores are on one NUMA node, or if Linux does not know the device's node.

    Args:
        index: of the device, as torch numbers those that this process sees. CUDA starts, without a context.
    """
    global _unbound
    import torch

    with contextlib.suppress(AttributeError, OSError, ValueError):  # also a torch whose devices have no address
        folder = SYS / "devices/system/node"
        nodes = {path.parent.name: _core_numbers(path.read_text()) for path in folder.glob("node[0-9]*/cpulist")}
        node, before = _node(index), os.sched_getaffinity(0)
        cores = nodes.get(node, set())
        if not cores or cores == before or not set().union(*nodes.values()) <= before:
            return
        ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count())
        sharing = sum(_node(other) == node for other in range(ranks))
        os.sched_setaffinity(0, cores)
        _unbound = before
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), cores)
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(cores) // max(1, sharing))))


@contextlib.contextmanager
def unbound():
    """Processes that this thread starts meanwhile may use all cores that this process had before it was bound."""
    if _unbound is None:
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _unbound)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _node(index: int) -> str:
    """Name of a device's NUMA node, as `node1`; `node-1` if Linux does not know it. OSError if the device is hidden."""
    import torch

    device: Any = torch.cuda.get_device_properties(index)  # its stubs lack the address
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    return f"node{int((SYS / 'bus/pci/devices' / address / 'numa_node').read_text())}"


def _core_numbers(text: str) -> set[int]:
    """`0-1,4` -> {0, 1, 4}; a node without cores has an empty list."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
