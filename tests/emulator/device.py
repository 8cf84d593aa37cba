"""Makes this process's torch compute on the emulated device; the process has the variables of `build.environment`."""

import os
import sys
from itertools import pairwise

import operators  # type: ignore[import-not-found]  # built by `build.py`
import torch
from torch import Tensor

from tests.emulator import kernels, nccl

# Operators that only deal with memory, shapes and devices: torch's own run on the emulated runtime.
NATIVE = {
    "empty.memory_format", "empty_strided", "view", "as_strided", "_reshape_alias", "unfold", "set_",
    "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset", "resize_", "record_stream",
    "is_pinned", "_pin_memory", "_local_scalar_dense", "view_as_real", "view_as_complex", "is_set_to", "lift",
    "lift_fresh",
}  # fmt: skip
_library = torch.library.Library("aten", "IMPL")


def install():
    """Registers all operators. The process may fork afterwards: it has not initialised CUDA, nor asked it anything."""
    torch._C._cuda_getDeviceCount = lambda: 1
    names = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    }
    names = {name for name in names if "cudnn" not in name and "miopen" not in name}
    operators.install(sorted((names | {"copy_"}) - NATIVE - MISSING.keys()))
    for name, function in MISSING.items():
        _library.impl(name, _counted(name, function), "CUDA")
    for kind in ("flash", "mem_efficient", "cudnn"):  # which only GPUs have
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    torch.backends.mkldnn.set_flags(False)  # in 16 bits, bits of a row depend on the number of rows
    torch.compile = lambda function=None, **_: function if function is not None else lambda each: each
    kernels.install(interprets=bool(os.environ.get("EMULATOR_INTERPRETS")))
    nccl.install()
    torch.cuda._lazy_call(operators.follow_memory)  # once CUDA starts, which may be in a fork


def _counted(name: str, function):
    def call(*args, **kwargs):
        operators.count(f"aten::{name}")
        return function(*args, **kwargs)

    return call


def report():
    """Prints the memory at its peak: what the allocator took beyond what tensors used is fragmentation, or kept."""
    counts, mib = operators.counts(), 2**20
    reserved, allocated = (counts[f"bytes {kind} at the peak"] / mib for kind in ("reserved", "allocated"))
    if reserved:
        print(
            f"emulator: {reserved:.0f} MiB reserved at the peak, {allocated:.0f} MiB of them allocated", file=sys.stderr
        )


# -- operators without a CPU kernel --------------------------------------------------------------------------------


def _addmm_wider(x, a, b, out_dtype, beta=1, alpha=1, *, out):
    return out.copy_(beta * x + alpha * (a.to(out_dtype) @ b.to(out_dtype)))


def _mm_wide(a, b, out_dtype):
    return (a.double() @ b.double()).to(out_dtype)  # the same for any number of rows


def _rms_norm(x, shape, weight, eps):
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * scale * (1 if weight is None else weight.float())).to(x.dtype), scale


def _rms_norm_backward(grad, x, shape, scale, weight, mask):
    grad, normed = grad.float(), x.float() * scale
    scaled = grad * (1 if weight is None else weight.float())
    grad_x = (scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(x.dtype)
    return grad_x, None if weight is None else (grad * normed).flatten(0, -2).sum(0).to(x.dtype)


def _attended(query, key, value, queries: Tensor, keys: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Causal attention of packed segments, and log-sums [heads, T]; `window`: keys before a query's own; −1: all.

    In fp64, as the reference of decode steps: rounded to 16 bits, they are equal.
    """
    ends, outs, sums = [operators.on_host(bounds).tolist() for bounds in (queries, keys)], [], []
    for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True):
        of_groups = (
            tensor[c:d].double().repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)
        )
        k, v = of_groups
        scores = torch.einsum("qhd,khd->hqk", query[a:b].double(), k) * scale
        position = torch.arange(b - a, device=query.device)[:, None] + (d - c) - (b - a)
        distance = position - torch.arange(d - c, device=query.device)
        scores = scores.masked_fill((distance < 0) | (distance > (window if window >= 0 else d)), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).nan_to_num())
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs).to(query.dtype), torch.cat(sums, 1).float()


def _flash(query, key, value, queries, keys, max_q, max_k, dropout, causal, debug=False, *, scale=None,
           window_size_left=None, window_size_right=None, **_):  # fmt: skip
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data types")
    out, sums = _attended(query, key, value, queries, keys, scale, _window(window_size_left))
    return out, sums, *(torch.empty(0, device=query.device) for _ in range(3))


def _flash_backward(grad, query, key, value, out, sums, queries, keys, max_q, max_k, dropout, causal, seed, offset, *,
                    scale=None, window_size_left=None, window_size_right=None, **_):  # fmt: skip
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        out, _ = _attended(*leaves, queries, keys, scale, _window(window_size_left))
        return torch.autograd.grad(out, leaves, grad)


def _window(left: int | None) -> int:
    return -1 if left is None else left


MISSING = {
    "_fused_sdp_choice": lambda *_, **__: 0,  # the plain formula
    "addmm.dtype_out": _addmm_wider,
    "mm.dtype": _mm_wide,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
}
