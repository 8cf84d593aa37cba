"""The CPU shim: a test for each replacement, no dispatch mode, no change if CUDA is present."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random

import megarl.mcore  # noqa: F401  installs the shim
from megarl.errors import UsageError
from megarl.mcore import device
from tests.helpers.worlds import SAFETY_SECONDS

CPU = torch.device("cpu")


def test_every_cuda_function_is_replaced_and_tested_here():
    here = Path(__file__).read_text()
    for name, function in device.cuda_functions().items():
        installed = getattr(torch.cuda, name)
        assert getattr(installed, "__module__", "") == device.__name__, name
        assert installed.__qualname__ == function.__qualname__ and f"torch.cuda.{name}" in here, name


def test_current_device_is_the_cpu():
    assert not device.has_cuda() and device.device() == CPU and device.backend() == "gloo"
    assert torch.cuda.set_device(3) is None and torch.cuda.current_device() == CPU
    assert torch.empty(1, device=torch.cuda.current_device()).device == CPU
    assert torch.cuda.device_count() == 1
    assert torch.cuda.is_current_stream_capturing() is False
    assert torch.cuda.get_device_capability(0) == (0, 0)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.major, properties.minor, properties.total_memory) == ("cpu", 0, 0, 0)


@pytest.mark.parametrize("value", ["staged", "nccl"])
def test_a_backend_of_checks_is_refused_elsewhere(value, monkeypatch):
    monkeypatch.setenv(device.BACKEND, value)
    with pytest.raises(UsageError, match=f"MEGARL_DEVICE_BACKEND {value}: only tools.gpu.staged"):
        device.backend()


def test_memory_questions_answer_zero():
    assert torch.cuda.synchronize() is None and torch.cuda.empty_cache() is None
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == stats["reserved_bytes.all.current"] == 0
    assert stats["allocation.all.current"] == 0
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == 0


def test_random_state_is_the_cpu_generators():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), first)
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())
    assert torch.equal(torch.rand(4), first)


def test_events_measure_the_clock(monkeypatch):
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=iter((7.0, 7.25)).__next__))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record(torch.cuda.current_stream())
    assert start.elapsed_time(end) == 250.0
    assert end.query() is True
    assert start.synchronize() is None and start.wait() is None


def test_streams_have_nothing_to_wait_for():
    stream = torch.cuda.Stream()
    assert stream.device == CPU and stream.query() is True and stream.cuda_stream == 0
    event = stream.record_event()
    assert isinstance(event, device.CpuEvent)
    assert stream.record_event(event) is event
    assert stream.wait_stream(stream) is stream.wait_event(event) is stream.synchronize() is None
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        assert torch.ones(1).item() == 1
    assert torch.cuda.set_stream(stream) is None


@pytest.mark.parametrize("name", device.FACTORIES)
@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", torch.device("cuda", 0), "cpu", None])
def test_factories_read_cuda_as_cpu(name, wanted):
    factory = getattr(torch, name)
    arguments = {"full": ((2, 3), 1.0), "tensor": ([1.0],), "arange": (3,), "randint": (0, 5, (2,)),
                 "empty_like": (torch.ones(2),), "zeros_like": (torch.ones(2),)}.get(name, (2, 3))  # fmt: skip
    made = factory(*arguments, device=wanted)
    assert made.device == CPU
    pinned = factory(*arguments, pin_memory=True) if name not in ("empty_like", "zeros_like") else made
    assert pinned.device == CPU and not pinned.is_pinned()
    assert factory.__name__ == name


def test_factories_keep_other_devices_and_arguments():
    assert torch.empty(2, device="meta").device.type == "meta"
    made = torch.full((2,), 3.0, dtype=torch.float64, device="cuda", requires_grad=True)
    assert made.dtype == torch.float64 and made.requires_grad and made.tolist() == [3.0, 3.0]


@pytest.mark.long
def test_a_device_as_context_manager_still_chooses_the_device():
    """Transformers builds a model on the meta device before it reads the weights."""
    code = "import megarl.mcore, torch\nwith torch.device('meta'): print(torch.arange(3).device, torch.empty(2).device)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert done.stdout == "meta meta\n", done.stderr


def test_tensors_and_modules_stay_where_they_are():
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda() is tensor and tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert module.cuda() is module and module.cuda(0) is module
    assert next(module.parameters()).device == CPU


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_to_cuda_stays_on_the_cpu(wanted):
    tensor = torch.ones(2)
    assert tensor.to(wanted).device == CPU
    assert tensor.to(device=wanted).device == CPU
    assert tensor.to(wanted, torch.float64).dtype == torch.float64
    assert tensor.to(torch.device("meta")).device.type == "meta"
    assert tensor.to(torch.int32).dtype == torch.int32
    assert tensor.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_type_names_the_cuda_class_and_still_converts():
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2, device="meta").type() == "torch.meta.FloatTensor"
    assert torch.ones(2).type(torch.float64).dtype == torch.float64


def test_what_does_nothing_on_a_cpu():
    assert torch.cuda.nvtx.range_push("phase") is None and torch.cuda.nvtx.range_pop() is None

    def double(x):
        return 2 * x

    assert torch.compile(double) is torch.compile(double, dynamic=True) is double
    assert torch.compile(mode="max-autotune")(double) is double
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_megatron_places_that_test_for_a_kernel():
    torch.manual_seed(3)
    state = random._get_cuda_rng_state()
    first = torch.rand(2)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(2), first)


def test_installing_again_changes_nothing():
    empty, to = torch.empty, torch.Tensor.to
    device.install()
    assert torch.empty is empty and torch.Tensor.to is to


@pytest.mark.long
def test_install_happens_before_megatron_is_imported():
    program = """
import sys, torch
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron":
            import megarl.mcore.device as device
            assert torch.cuda.current_device() == torch.device("cpu"), "megatron imported before the shim"
            print("seen")
sys.meta_path.insert(0, Watch())
import megarl.mcore
import megarl.mcore.config.megatron_flags
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "seen" in done.stdout


def test_with_cuda_present_install_changes_nothing():
    path = importlib.util.find_spec("megarl.mcore.device").origin
    program = f"""
import importlib.util, sys, torch
torch.cuda.is_available = lambda: True
def names(space):
    return {{name: id(value) for name, value in vars(space).items()}}
spaces = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module]
before = [names(space) for space in spaces]
spec = importlib.util.spec_from_file_location("device", {path!r})
device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(device)
device.install()
device.install()
assert device.has_cuda() and device.backend() == "nccl"
assert [names(space) for space in spaces] == before, "install() changed torch"
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_attention_by_cudnn_is_off():
    program = """
import torch
torch.backends.cuda.enable_cudnn_sdp(True)
import megarl.mcore
print(torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
