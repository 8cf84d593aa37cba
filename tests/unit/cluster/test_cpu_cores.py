"""Cores of a container, and ranks on those of their device's NUMA node, with a made-up `/sys` and affinities."""

import os
import subprocess
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.child_process import Child
from megarl.cluster import cpu_cores
from megarl.comm import role_mesh
from megarl.mcore import device
from megarl.rewards import sandbox

ALL = {0, 1, 2, 3, 4, 5}
TWO = {"node0": "0-2", "node1": "3,4-5"}
EIGHTH, IN_DOMAIN = (0, 0x8A, 0), (0x10001, 0, 2)  # PCI domain, bus and device


class Machine:
    """A machine with NUMA nodes and CUDA devices, and the affinity of this process's threads."""

    def __init__(self, monkeypatch, tmp_path, nodes: dict[str, str], devices: dict[tuple, str]):
        self.affinity, self.threads, self.properties = ALL, 6, []
        for name, cores in nodes.items():
            (tmp_path / "devices/system/node" / name).mkdir(parents=True)
            (tmp_path / "devices/system/node" / name / "cpulist").write_text(cores + "\n")
        for (domain, bus, number), node in devices.items():
            folder = tmp_path / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{number:02x}.0"
            if node:
                folder.mkdir(parents=True)
                (folder / "numa_node").write_text(node + "\n")
            properties = SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=number)
            self.properties.append(properties)
        monkeypatch.setattr(cpu_cores, "SYS", tmp_path)
        monkeypatch.setattr(cpu_cores, "_unbound", None)
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: self.affinity, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.bind, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self.properties[index])
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: setattr(self, "threads", threads))

    def bind(self, thread: int, cores: set[int]):
        assert thread in {0, *map(int, os.listdir("/proc/self/task"))}
        self.affinity = set(cores)


@pytest.mark.parametrize("nodes, devices, ranks, bound, threads", [
    (TWO, {EIGHTH: "1"}, 1, {3, 4, 5}, 3),
    (TWO, {IN_DOMAIN: "0"}, 1, {0, 1, 2}, 3),
    (TWO, {EIGHTH: "1", IN_DOMAIN: "0"}, 2, {3, 4, 5}, 3),
    (TWO, {EIGHTH: "1", IN_DOMAIN: "1"}, 2, {3, 4, 5}, 1),  # both ranks on these three cores
    (TWO, {EIGHTH: "1", IN_DOMAIN: "1"}, 1, {3, 4, 5}, 3),
    (TWO | {"node2": ""}, {EIGHTH: "1"}, 1, {3, 4, 5}, 3),  # memory without cores
    (TWO | {"node2": ""}, {EIGHTH: "2"}, 1, ALL, 6),
    (TWO, {EIGHTH: "-1"}, 1, ALL, 6),
    (TWO, {EIGHTH: ""}, 1, ALL, 6),  # no such folder
    (TWO, {EIGHTH: "odd"}, 1, ALL, 6),
    ({}, {EIGHTH: "1"}, 1, ALL, 6),
    ({"node0": "0-5"}, {EIGHTH: "0", IN_DOMAIN: "0"}, 2, ALL, 6),
])  # fmt: skip
def test_a_rank_is_bound_to_its_devices_node(monkeypatch, tmp_path, nodes, devices, ranks, bound, threads):
    machine = Machine(monkeypatch, tmp_path, nodes, devices)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    cpu_cores.bind_to_device(0)
    assert (machine.affinity, machine.threads) == (bound, threads)


@pytest.mark.parametrize("cores", [{3, 4, 5}, {0, 1}, {4}, ALL - {0}])
def test_a_rank_that_is_bound_already_stays_as_it_is(monkeypatch, tmp_path, cores):
    """By numactl, Slurm, a container or torchrun: to this node, the other one, a core, or all but one core."""
    machine = Machine(monkeypatch, tmp_path, TWO, {EIGHTH: "1"})
    machine.affinity = cores
    cpu_cores.bind_to_device(0)
    assert (machine.affinity, machine.threads) == (cores, 6)
    with cpu_cores.unbound():
        assert machine.affinity == cores


def test_a_system_that_forbids_it_is_no_error(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, TWO, {EIGHTH: "1"})

    def forbid(thread, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    cpu_cores.bind_to_device(0)
    with cpu_cores.unbound():
        assert (machine.affinity, machine.threads) == (ALL, 6)


def test_all_threads_are_bound(monkeypatch, tmp_path):
    """Also those of libraries that were imported before."""
    Machine(monkeypatch, tmp_path, TWO, {EIGHTH: "1"})
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.append(thread))
    cpu_cores.bind_to_device(0)
    assert set(map(int, os.listdir("/proc/self/task"))) <= set(bound)


@pytest.mark.parametrize("start", [
    pytest.param(lambda: Child("megarl.environments.loading"), id="child"),
    pytest.param(lambda: sandbox._run("", "", sandbox.Limits()), id="sandbox"),
])  # fmt: skip
def test_processes_of_rewards_and_environments_may_use_all_cores(monkeypatch, tmp_path, start):
    machine, found = Machine(monkeypatch, tmp_path, TWO, {EIGHTH: "1"}), []
    cpu_cores.bind_to_device(0)

    def started(*_, **__):
        found.append(machine.affinity)
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(InterruptedError):
        start()
    assert found == [ALL] and machine.affinity == {3, 4, 5}


def test_a_rank_is_bound_before_cuda_has_a_context(monkeypatch, tmp_path):
    machine, found = Machine(monkeypatch, tmp_path, TWO, {EIGHTH: "0", IN_DOMAIN: "1"}), []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append((index, machine.affinity)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    role_mesh.join_process_group(timedelta(seconds=5))
    assert found == [(1, {3, 4, 5})]


def test_cores_are_those_of_the_container(tmp_path, monkeypatch):
    bound = len(os.sched_getaffinity(0))
    for text, count in (("max 100000", bound), ("50000 100000", 1), ("100000 100000", 1), ("6400000 100000", bound)):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(cpu_cores, "QUOTA", tmp_path / "cpu.max")
        assert cpu_cores.cores() == count, text
    monkeypatch.setattr(cpu_cores, "QUOTA", tmp_path / "none")
    assert cpu_cores.cores() == bound
