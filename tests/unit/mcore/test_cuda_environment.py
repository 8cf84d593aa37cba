"""Variables that are chosen before CUDA starts: one launch queue only for ranks with tensor or context parallelism on
older devices, and no registered graphs with expandable segments."""

import json
import os
import subprocess
import sys
from argparse import Namespace

import pytest

from megarl.mcore import cuda_environment, device
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
    source, library = folder / "nvml.c", folder / cuda_environment.NVML
    source.write_text(DRIVER % (status, capability))
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library


@needs_compiler
@pytest.mark.parametrize(("status", "found"), [(0, 12), (9, None)])
def test_the_capability_is_asked_of_the_driver(tmp_path, status, found, monkeypatch):
    monkeypatch.setattr(cuda_environment, "NVML", str(driver(tmp_path, 12, status)))
    assert cuda_environment.capability() == found


def test_no_driver_no_capability(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_environment, "NVML", str(tmp_path / "none.so"))
    assert cuda_environment.capability() is None


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
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name in (cuda_environment.QUEUES, cuda_environment.REGISTRATION, *cuda_environment.ALLOCATOR):
        environment.pop(name, None)
    if given is not None:
        environment[cuda_environment.QUEUES] = given
    if capability is not None:
        driver(tmp_path, capability)
    program = f"-W ignore -m tests.cuda_walk.environment rl {SHAPE} {ROLES} {flags}"
    command = [sys.executable, *program.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"used": [], "chosen": [expected, None]}


@pytest.mark.parametrize(("variable", "setting", "given", "expected"), [
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", None, "0"),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True", None, "0"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "1", "1"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:False", None, None),
])  # fmt: skip
def test_graphs_register_no_buffers_of_expandable_segments(monkeypatch, variable, setting, given, expected):
    environment = {variable: setting} | ({} if given is None else {cuda_environment.REGISTRATION: given})
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    cuda_environment.choose([Namespace(tensor_model_parallel_size=1, context_parallel_size=1)])
    assert environment.get(cuda_environment.REGISTRATION) == expected


def test_nothing_is_set_on_a_cpu(monkeypatch):
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setattr(os, "environ", environment)
    cuda_environment.choose([Namespace(tensor_model_parallel_size=2, context_parallel_size=2)])
    assert not device.has_cuda() and list(environment) == ["PYTORCH_ALLOC_CONF"]


@pytest.mark.long
def test_a_cpu_stays_one_if_torch_is_to_ask_the_driver():
    program = "from megarl.mcore import device; import torch; print(device.has_cuda(), torch.cuda.is_available())"
    environment = os.environ | {device.ASK_DRIVER: "1"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
