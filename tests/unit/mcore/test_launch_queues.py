"""One launch queue only for ranks with tensor or context parallelism on older devices, chosen before CUDA starts."""

import json
import os
import subprocess
import sys
from argparse import Namespace

import pytest

from megarl.mcore import device, launch_queues
from tests.cuda_walk.start import ROOT, compiler, needs_compiler, stand_ins

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-prompt-length 5 --max-response-length 6"
ROLES = "--role-map actor=0-1;critic=2-3;reward=2-3;reference=2-3"
DRIVER = """int nvmlInit_v2(void) { return %d; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &nvmlInit_v2; return index; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = handle == &nvmlInit_v2 ? %d : 0; *minor = 7; return 0;
}
"""


def driver(folder, capability: int, status: int = 0):
    """A library of the driver that tells one capability, or fails with a status."""
    source, library = folder / "nvml.c", folder / launch_queues.NVML
    source.write_text(DRIVER % (status, capability))
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library


@needs_compiler
@pytest.mark.parametrize(("status", "found"), [(0, 12), (9, None)])
def test_the_capability_is_asked_of_the_driver(tmp_path, status, found, monkeypatch):
    monkeypatch.setattr(launch_queues, "NVML", str(driver(tmp_path, 12, status)))
    assert launch_queues.capability() == found


def test_no_driver_no_capability(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_queues, "NVML", str(tmp_path / "none.so"))
    assert launch_queues.capability() is None


CASES = {  # flags, rank, compute capability (None: no library of the driver), the user's value -> the variable
    "tensor parallelism": ("--actor-tensor-model-parallel-size 2", 1, 9, None, "1"),
    "context parallelism": ("--actor-context-parallel-size 2", 0, 9, None, "1"),
    "a rank of other roles": ("--actor-tensor-model-parallel-size 2", 2, 9, None, None),
    "another role of the rank": ("--reference-tensor-model-parallel-size 2", 3, 9, None, "1"),
    "data parallelism": ("", 0, 9, None, None),
    "a new device": ("--actor-tensor-model-parallel-size 2", 0, 10, None, None),
    "no driver": ("--actor-tensor-model-parallel-size 2", 0, None, None, "1"),
    "the user's value": ("--actor-tensor-model-parallel-size 2 --actor-context-parallel-size 1", 0, 9, "4", "4"),
    "the user's value without need": ("", 0, 9, "1", "1"),
    "sharded parameters": ("--use-torch-fsdp2 --untie-embeddings-and-output-weights", 0, 9, None, None),
}


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_a_program_chooses_before_it_uses_the_device(tmp_path, case):
    flags, rank, capability, given, expected = CASES[case]
    environment = stand_ins(tmp_path) | {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    environment.pop(launch_queues.VARIABLE, None)
    if given is not None:
        environment[launch_queues.VARIABLE] = given
    if capability is not None:
        driver(tmp_path, capability)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.cuda_walk.queues",
        "rl",
        *f"{SHAPE} {ROLES} {flags}".split(),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"used": [], "queues": expected}


def test_nothing_is_set_on_a_cpu(monkeypatch):
    monkeypatch.delenv(launch_queues.VARIABLE, raising=False)
    launch_queues.choose([Namespace(tensor_model_parallel_size=2, context_parallel_size=2)])
    assert not device.has_cuda() and launch_queues.VARIABLE not in os.environ


@pytest.mark.long
def test_a_cpu_stays_one_if_torch_is_to_ask_the_driver():
    program = "from megarl.mcore import device; import torch; print(device.has_cuda(), torch.cuda.is_available())"
    environment = os.environ | {device.ASK_DRIVER: "1"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
