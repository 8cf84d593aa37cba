"""A CUDA device without hardware: tensors on it have no numbers, tensors of the host are real, and using both in one
operation raises, as it does on CUDA.

`pretend` must run before megarl is imported, in a process in which `runtime.c` replaces CUDA's libraries. `Walk`
counts what costs time on a device: copies to it, reads by the host, and launches of some operators.
"""

import contextlib
import functools
import sys
import types
from collections import Counter

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_new = torch.Generator.__new__
aten = torch.ops.aten


def _listed(walk: "Walk", tensor: Tensor) -> list:
    """What `tolist` returns for a tensor without numbers: one read, zeros."""
    walk.reads.add(site())
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


def pretend():
    """Makes torch believe in one H100."""
    properties = types.SimpleNamespace(
        name="H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "synchronize": None, "empty_cache": None, "is_bf16_supported": True, "memory_allocated": 0,
        "memory_reserved": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None, "manual_seed": None,
        "manual_seed_all": None, "get_device_capability": (9, 0), "get_device_name": "H100",
        "get_device_properties": properties, "mem_get_info": (80 * 2**30, 80 * 2**30),
        "is_current_stream_capturing": False,
        "memory_stats": Counter(),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch._C._cuda_getDeviceCount = lambda: 1
    fake_tensor.init_gpu_context = lambda *_: None  # up to torch 2.11 it allocates on the device
    registered = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.cudart, torch.cuda.check_error = lambda: registered, lambda _: None
    torch.Generator = type("HostGenerator", (torch.Generator,), {"__new__": lambda kind, device=None: _new(kind)})
    torch.cuda.default_generators = (torch.Generator(),)
    state = torch.Generator().get_state()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state, module.set_rng_state = lambda *_, **__: state, lambda *_, **__: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: None
    torch.compile = lambda function=None, **_: function if function is not None else lambda f: f
    torch.tensor = _made_on_host(torch.tensor)
    torch.nn.Module.to = _moved(torch.nn.Module.to)
    torch.nn.Module.cuda = lambda module, *_, **__: module.to(CUDA)
    torch.UntypedStorage.device = _device_of_storage(torch.UntypedStorage.device)
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, *_: None


def stand_alone():
    """Lets megarl run as a rank of a fake world: others say what it says itself; weights have no numbers."""
    from megarl.mcore import device as place
    from megarl.mcore.model import gpt

    def gather(objects: list, item, group=None):
        objects[:] = [item] * len(objects)

    assert place.has_cuda()
    place.backend, gpt.initialize = lambda: "fake", lambda *_, **__: None
    torch.distributed.all_gather_object = gather


def _made_on_host(factory):
    """`torch.tensor` sends its numbers to the device where no dispatch mode sees it."""

    @functools.wraps(factory)
    def make(*args, device=None, **kwargs):
        with unset_fake_temporarily():
            made = factory(*args, **kwargs)
        return made if device is None else made.to(device)

    return make


def _device_of_storage(device):
    """`UntypedStorage.device`, for which memory of a tensor without numbers is on no device."""
    return property(lambda storage: CUDA if device.__get__(storage).type == "meta" else device.__get__(storage))


def _moved(to):
    """`Module.to` for the device: torch cannot swap real parameters for tensors without numbers."""

    @functools.wraps(to)
    def move(module, *args, **kwargs):
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, torch.dtype) or target is None or torch.device(target).type != "cuda":
            return to(module, *args, **kwargs)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not isinstance(parameter, FakeTensor):
                    part._parameters[name] = torch.nn.Parameter(parameter.detach().to(CUDA), parameter.requires_grad)
                    part._parameters[name].__dict__.update(parameter.__dict__)
            for name, buffer in part._buffers.items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    part._buffers[name] = buffer.to(CUDA)
        return module

    return move


def site() -> str:
    """The innermost line of megarl, else of Megatron, that called the operator."""
    frame, found = sys._getframe(1), "?"
    while frame:
        name = frame.f_code.co_filename
        if "/megarl/" in name:
            return f"{name.split('/megarl/', 1)[1]}:{frame.f_lineno}"
        if found == "?" and "/megatron/" in name:
            found = f"megatron/{name.split('/megatron/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return found


class Crossings(Counter):
    """Counts what crosses between host and device, by the line that caused it; a graph can hold none of it."""

    def __init__(self, walk: "Walk", to_host: bool):
        super().__init__()
        self._walk, self._to_host = walk, to_host

    def add(self, place: str):
        """Counts one."""
        if self._walk.is_capturing:
            raise RuntimeError(f"a CUDA graph cannot hold what crosses between host and device at {place}")
        self[place] += 1
        if self._walk.log is not None:
            self._walk.log.crossing(self._to_host)


def _pretend_graphs(walk: "Walk"):
    """Makes torch capture and replay nothing, and count it."""

    class Graph:
        def pool(self):
            return 0, 0

        def replay(self):
            walk.replays += 1
            if walk.log is not None:
                walk.log.replay(self)

    @contextlib.contextmanager
    def capture(graph, pool=None, capture_error_mode="global"):
        walk.is_capturing = True
        walk.captures += 1
        if walk.log is not None:
            walk.log.begin_capture()
        try:
            yield
        finally:
            walk.is_capturing = False
        if walk.log is not None:
            walk.log.end_capture(graph)

    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture


def _all_of(index: Tensor | None) -> Tensor | None:
    """A mask of rows as the indices of all rows."""
    if index is None or index.dtype is not torch.bool:
        return index
    assert index.dim() == 1
    return torch.empty(len(index), dtype=torch.int64, device=CUDA)


def is_group(value) -> bool:
    """Whether an argument of a collective is its process group."""
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"


class Walk(TorchDispatchMode):
    """Counts, by the line that caused them: `sends` to the device, `reads` by the host; `launches` by operator; and
    collects the different `shapes` of the tensors that attention reads."""

    def __init__(self):
        super().__init__()
        self.captures = self.replays = 0  # of CUDA graphs
        self.is_capturing = False
        self.all_true = False  # whether all truth values are True that the host reads or that choose rows
        self.log = None  # a `cost.log.Log` of all that the device does; None: counts suffice
        self.clear()

    def clear(self):
        """Begins to count anew."""
        self.sends, self.reads, self.launches = Crossings(self, False), Crossings(self, True), Counter()
        self.shapes: set[str] = set()

    def counts(self) -> dict:
        """All that was counted, for JSON."""
        counters = {name: dict(getattr(self, name)) for name in ("sends", "reads", "launches")}
        return {**counters, "shapes": sorted(self.shapes)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        of_device = [x for x in tensors if isinstance(x, FakeTensor)]
        places = [kwargs.get("device"), *(x for x in args if isinstance(x, torch.device))]
        wants_device = any(x is not None and torch.device(x).type == "cuda" for x in places)
        if not of_device and not wants_device:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        kind = func.overloadpacket
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if kind is aten.to:  # in inference mode it arrives as it is called
            return self._to(args, kwargs)
        if kind in (aten._to_copy, aten.copy_, aten.copy):
            return self._copy(func, args, kwargs, wants_device)
        if kind in (aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero):
            self.reads.add(site())
            is_number = kind in (aten._local_scalar_dense, aten.item)
            if not is_number or self.all_true and args[0].dtype is torch.bool:
                return True
            return 1.0 if args[0].is_floating_point() else 0
        if kind in (aten.index, aten.index_put, aten.index_put_):
            for index in args[1]:
                if index is not None and not isinstance(index, FakeTensor):
                    self.sends.add(f"host index {site()}")
                elif index is not None and index.dtype is torch.bool and kind is aten.index:
                    self.reads.add(f"mask as index {site()}")
        if kind is aten.repeat_interleave and not args[0].numel():  # of nothing: the only size that is known here
            self.reads.add(site())
            return args[0].new_empty(0)
        if kind in (aten.index, aten.index_put, aten.index_put_) and self.all_true:
            args = (args[0], [_all_of(index) for index in args[1]], *args[2:])
        if kind is aten.nonzero and self.all_true:
            self.reads.add(f"shape {site()}")
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=CUDA)
        self.launches[str(kind)] += 1
        if "decode" in str(kind) or "attention" in str(kind) or "attn" in str(kind):
            self.shapes.add(f"{kind} {[tuple(x.shape) for x in of_device]}")
        if func is aten.addmm.dtype_out:  # torch 2.11 takes its arguments in a wrong order here
            if self.log is not None:
                self.log.kernel(func, args, kwargs, kwargs["out"])
            return kwargs["out"]
        try:
            return self._run(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self.reads.add(f"shape {site()}")
            raise

    def _run(self, func, args, kwargs):
        """An operator of the device alone."""
        with self.log or contextlib.nullcontext():
            return func(*args, **kwargs)

    def _communicate(self, func, args, kwargs):
        """A collective of one rank: nothing moves."""
        self.launches[str(func.overloadpacket)] += 1
        if self.log is not None:
            self.log.collective(func, args)
        (group,) = [x for x in pytree.tree_leaves((args, kwargs)) if is_group(x)]
        with unset_fake_temporarily():  # without memory for stand-ins: those of a large model have no room
            work = torch.ops.c10d.barrier(torch.empty(1), group, [], True, -1)
        return (args[0], work) if len(func._schema.returns) == 2 else work

    def _to(self, args, kwargs):
        for value in args[1:]:
            if isinstance(value, (torch.dtype, torch.device)):
                kwargs["dtype" if isinstance(value, torch.dtype) else "device"] = value
            elif isinstance(value, torch.Tensor):
                kwargs |= {"dtype": value.dtype, "device": value.device}
        kept = {name: value for name, value in kwargs.items() if name in ("dtype", "device") and value is not None}
        source = args[0]
        device, dtype = torch.device(kept.get("device", source.device)), kept.get("dtype", source.dtype)
        if device.type == source.device.type and dtype == source.dtype and not kwargs.get("copy"):
            return source
        return self._copy(aten._to_copy.default, (source,), kept, "device" in kept and device.type == "cuda")

    def _copy(self, func, args, kwargs, wants_device: bool):
        if func.overloadpacket is aten._to_copy:
            source, target = args[0], wants_device or (isinstance(args[0], FakeTensor) and "device" not in kwargs)
            if isinstance(source, FakeTensor) and target:
                return self._run(func, args, kwargs)
            dtype = kwargs.get("dtype") or source.dtype
            if target:
                self.sends.add(site())
                return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=CUDA)
            self.reads.add(site())
            with unset_fake_temporarily():
                return torch.ones(source.shape, dtype=dtype)
        target, source = args[:2]
        if isinstance(target, FakeTensor) and not isinstance(source, FakeTensor):
            self.sends.add(site())
            return target
        if isinstance(source, FakeTensor) and not isinstance(target, FakeTensor):
            self.reads.add(site())
            return target
        return self._run(func, args, kwargs)


@contextlib.contextmanager
def on_device():
    """Context in which new tensors of device "cuda" are on the pretended device; yields the `Walk`."""
    walk = Walk()
    FakeTensor.tolist = lambda tensor: _listed(walk, tensor)
    _pretend_graphs(walk)
    with FakeTensorMode(allow_non_fake_inputs=True), walk:
        yield walk
