"""The engine's steps on a CUDA device: here device tensors have no numbers, and an operation on two devices raises."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.keyed_sampling import KeyedSampling
from megarl.mcore.inference.reusable_blocks import ReusableBlocks
from tests.helpers.worlds import on_each_rank

BLOCKS, BLOCK, VOCAB, REQUESTS = 12, 16, 512, 4


class Host(TorchDispatchMode):
    """Within fake tensors: what the host computes from its own tensors is real. Notes where cumulative sums of
    floating-point numbers are computed, which torch refuses on CUDA in deterministic runs."""

    def __init__(self):
        super().__init__()
        self.sums = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.cumsum and args[0].dtype.is_floating_point:
            self.sums.add(args[0].device.type)
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        if is_fake or torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def on_device(*shape: int) -> torch.Tensor:
    """A tensor on the device, to which others can now move: `mcore/device.py` made torch ignore it."""
    torch.Tensor.to = getattr(torch.Tensor.to, "__wrapped__", torch.Tensor.to)
    tensor = torch.ops.aten.empty.memory_format(shape, device=torch.device("cuda"))
    assert tensor.is_cuda and torch.zeros(1).to(tensor.device).is_cuda
    return tensor


# Both run in a fork: autograd fails in processes forked after fake tensors were used.
@on_each_rank()
def test_blocks_of_a_cache_on_the_device_are_cleared(rank):
    """Blocks of the host's allocator, cleared in a cache on the device."""
    with FakeTensorMode(allow_non_fake_inputs=True), Host():
        memory = on_device(2, BLOCKS, BLOCK, 2, 8)
        context = SimpleNamespace(memory_buffer=memory, block_size_tokens=BLOCK, layer_caches=memory.unbind)
        blocks = ReusableBlocks(KVBlockAllocator(context, BLOCKS, 0), layers=(0, 1), topk=2)
        blocks.record(True)
        assert blocks.allocate_memory_blocks(3).tolist() == [8, 9, 10]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("settings", [SamplingSettings(1.1), SamplingSettings(top_k=5, top_p=0.9),
                                      SamplingSettings(top_p=0.9), SamplingSettings(greedy=True)], ids=str)  # fmt: skip
@on_each_rank()
def test_a_step_samples_on_the_device_without_floating_point_cumulative_sums(rank, settings, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    row = torch.arange(REQUESTS, dtype=torch.int32)
    context = SimpleNamespace(sampled_rows=lambda: (row, 2 * row))
    sampling = KeyedSampling(VOCAB, 1)
    sampling.settings, sampling.keys = settings, torch.arange(REQUESTS)
    with FakeTensorMode(allow_non_fake_inputs=True), Host() as host:
        tokens = sampling.sample_kernel(on_device(REQUESTS, VOCAB), REQUESTS, context)
        assert tokens.device.type == sampling.log_probs(tokens).device.type == "cuda" and not host.sums
