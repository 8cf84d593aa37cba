"""What kernels of a device do: bytes that they read and write, FLOPs of products, by the shapes of an operator.

An operator counts as one kernel, which reads its arguments and writes its results once. The exceptions are here.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FREE = {  # no kernel, besides views
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_", "set_",
    "record_stream", "lift_fresh", "_local_scalar_dense", "is_pinned", "_reshape_alias", "sym_size", "is_same_size",
}  # fmt: skip
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
PICKS = {"embedding", "index_select", "gather", "index", "take"}  # they read of their first argument what they return
PUTS = {"index_put_", "index_copy_", "index_add_", "scatter_", "scatter_add_"}  # they touch what they write
KERNELS = {
    "swiglu_gated_backward": 2,
    "_varlen_attn_backward": 3,
    "sort": 4,
    "nonzero_static": 2,
}  # others have one
PASSES = {"sample_rows": 3, "row_logprobs": 2}  # over rows of logits
BACKWARD = 2.5  # FLOPs of attention's backward over those of its forward: five products for two


class Work(NamedTuple):
    """What an operator does on the device. `is_fp32`: its products are of 32 bits; `is_backward`: autograd's."""

    name: str
    bytes: float
    flops: float = 0.0
    kernels: int = 1
    is_fp32: bool = False
    is_backward: bool = False


def size(tree) -> int:
    """Bytes of all tensors, without what they repeat."""
    return sum(map(_bytes, _tensors(tree)))


def work_of(func, args: tuple, kwargs: dict, result, requests: int, keys: int) -> Work | None:
    """The work of a call of an operator on tensors without numbers; None if it is only the host's.

    `requests`: of a decode step, further rows are padding; `keys`: that the token of a request sees.
    """
    name = func.overloadpacket.__name__
    if func.is_view or name in FREE:
        return None
    count = KERNELS.get(name, 1)
    if name == "paged_decode":
        return Work(name, *_paged_decode(args, requests, keys), count)
    if name == "rotate_and_store":  # of the cache it writes the new rows
        return Work(name, 2 * size(args[:3]), 0.0, count)
    is_product = name in PRODUCTS
    flops = PRODUCTS[name](args, result) if is_product else 0.0
    is_fp32 = is_product and _tensors(args)[1].dtype is torch.float32
    moved = _grouped(args, result) if name == "_grouped_mm" else _moved(func, name, args, kwargs, result)
    return Work(name, moved, flops, count, is_fp32)


def _moved(func, name: str, args: tuple, kwargs: dict, result) -> float:
    if name in PICKS:
        return size(args[1:]) + 2 * size(result)
    if name == "index_fill_":
        source, dim, index = args[:3]
        return size(source) // source.shape[dim] * index.numel()
    if name in PUTS:
        return 2 * size(args[1:])
    read, written = 0, size(result)
    for number, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[number] if number < len(args) else None)
        is_overwritten = argument.is_write and (name in OVERWRITES or argument.name == "out")
        read += 0 if is_overwritten else size(value) * PASSES.get(name, 1)
        is_written = argument.is_write and argument.name != "grads"  # which the optimizer only may scale
        if is_written and not any(x is y for x in _tensors(value) for y in _tensors(result)):
            written += size(value)
    return read + written


def _tensors(tree) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or not length else 1
    return count * tensor.itemsize


def _product(args, result) -> float:
    """2·M·N·K: each number of the result sums over the last size of the first matrix."""
    left, right = [x for x in args if isinstance(x, Tensor)][-2:]
    return 2.0 * left.numel() * right.shape[-1]


def _grouped(args, result) -> float:
    """Of E weights, R rows touch 1 − (1 − 1/E)ᴿ."""
    left, right = args[:2]
    if right.dim() == 2:
        return size((left, right, result))
    experts, rows = len(right), left.shape[0]
    return size((left, result)) + size(right) * (1 - (1 - 1 / experts) ** rows)


def _attention(args, result) -> float:
    """4·T·H·D·k of causal segments: k keys on average, fewer with a window."""
    query, (max_queries, max_keys) = args[0], args[5:7]
    return 4.0 * query.numel() * (max_keys - (max_queries - 1) / 2)


def _attention_backward(args, result) -> float:
    query, (max_queries, max_keys) = args[1], args[8:10]
    return BACKWARD * 4.0 * query.numel() * (max_keys - (max_queries - 1) / 2)


def _paged_decode(args, requests: int, keys: int) -> tuple[float, float]:
    """(bytes, FLOPs): each key and value is read once; what parts of them give is written and read again."""
    from megarl.mcore.kernels.cuda.segment_attention import split_of

    query, cache, table = args[:3]
    window, arrived = [*args[5:], *(None, None)[len(args) - 5 :]][:2]
    rows, groups, heads, channels = query.shape
    keys = min(rows, requests) * min(keys, window or keys)
    parts = keys / split_of(table.shape[1] * cache.shape[1]) if arrived is not None else 0
    moved = keys * groups * 2 * channels * cache.itemsize + 2 * size(query)
    return moved + 2 * parts * groups * heads * (channels + 2) * 4, 4.0 * groups * heads * channels * keys


PRODUCTS = {
    "mm": _product, "bmm": _product, "addmm": _product, "baddbmm": _product, "addmm_": _product,
    "fixed_tile_product": lambda args, _: 2.0 * args[0].numel() * args[1].shape[0], "_grouped_mm": _product,
    "_varlen_attn": _attention, "_varlen_attn_backward": _attention_backward,
}  # fmt: skip
