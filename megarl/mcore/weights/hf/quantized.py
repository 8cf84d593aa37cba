"""How a folder's files hold tensors: as they are, or quantized, and what config.json says about them.

fp8 with a scale for each block, row or tensor and MXFP4 (GPT-OSS) are read as the numbers that they stand for, slice by
slice, as if the tensor were as it is. Names of scales, and which numbers share one, differ by the library that wrote
them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.errors import UsageError

CONFIG_ENTRY = "quantization_config"
FP8, COMPRESSED, MODELOPT = "fp8", "compressed-tensors", "modelopt"  # values of `quant_method`
METHODS = (FP8, COMPRESSED, MODELOPT)
DEFAULT_BLOCK = (128, 128)
# Last parts of the names of scalars that scale activations or a cache: they have no part in the weights.
ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale")
STRATEGIES = {"tensor": (None, None), "channel": (1, None)}  # of compressed-tensors
GROUP = 32  # values of MXFP4 with one scale
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_EXPONENT = 255  # of an e8m0 scale
MXFP4 = "mxfp4"
FP8_TYPE, SCALE_TYPES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
ONE_SCALE = ((), (1,))  # shapes of a scale of a whole tensor
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
CONFIG_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

MakeError = Callable[[str], UsageError]
Index = tuple[Any, ...]  # an expert (int) of a tensor that stacks them, then a slice with begin and end of each axis
ReadStored = Callable[[str, Index], Tensor]  # (name, index) -> a slice of a tensor as the file holds it


# What is after the name of a scale's tensor, and rows and columns that share a scale; None: all.
Fp8Format = tuple[str, int | None, int | None]


def as_object(entry: Any) -> dict[str, Any]:
    """`quantization_config`, which may be the name of a method alone."""
    return {"quant_method": None} | entry if isinstance(entry, dict) else {"quant_method": entry}


def format_of(entry: Any, error: MakeError) -> Fp8Format | None:
    """The format that `quantization_config` describes; None for a method without fp8. UsageError for a form of one of
    the methods that is not read."""
    values = as_object(entry)
    method = values["quant_method"]
    if method == FP8:
        block = values.get("weight_block_size", list(DEFAULT_BLOCK))
        return "_scale_inv", *((None, None) if block is None else _block(block, error))
    if method == MODELOPT:
        algorithm = values.get("quant_algo")
        if algorithm != "FP8":
            raise error(f"config.json: {CONFIG_ENTRY}: quant_algo {algorithm!r} of {MODELOPT}: allowed is 'FP8'")
        return "_scale", None, None
    return _compressed(values, error) if method == COMPRESSED else None


def _block(block: Any, error: MakeError) -> tuple[int, int]:
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise error(
            f"config.json: {CONFIG_ENTRY}: weight_block_size {block!r}: allowed are two whole numbers above 0, the "
            "rows and columns that have one scale, or null for one scale of a whole tensor"
        )
    return block[0], block[1]


def _compressed(values: dict[str, Any], error: MakeError) -> Fp8Format:
    """The only form of weights that all groups of layers have."""
    groups = values.get("config_groups")
    if values.get("transform_config"):
        raise error(f"config.json: {CONFIG_ENTRY}: transform_config: allowed is none: it rotates weights")
    described = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in described]
    found = {_strategy(each, error) for each in weights}
    if len(found) != 1:
        raise error(
            f"config.json: {CONFIG_ENTRY}: config_groups {str(groups)[:200]}: allowed is one kind of weights of "
            f"{COMPRESSED}, in fp8"
        )
    return "_scale", *STRATEGIES[found.pop()]


def _strategy(weights: Any, error: MakeError) -> str:
    values = weights if isinstance(weights, dict) else {}
    kind = values.get("num_bits"), values.get("type"), values.get("strategy"), values.get("symmetric", True)
    if kind not in [(8, "float", strategy, True) for strategy in STRATEGIES]:  # may hold lists
        raise error(
            f"config.json: {CONFIG_ENTRY}: weights of {COMPRESSED} with num_bits {kind[0]!r}, type {kind[1]!r}, "
            f"strategy {kind[2]!r}, symmetric {kind[3]!r}: allowed are 8, 'float', "
            f"{' or '.join(map(repr, STRATEGIES))} and true; take the model's folder in 16 bits"
        )
    return kind[2]


class StoredTensor(NamedTuple):
    """A tensor as it is in a file."""

    file: str  # name in the folder
    dtype: str  # as safetensors names it: F32, BF16, F16 …
    shape: tuple[int, ...]


class Fp8Tensor(NamedTuple):
    """A matrix [out, in], or one of each expert [E, out, in], in e4m3 with a scale for each block (2412.19437 §3.3),
    which may be a row or the whole matrix.

    A value is the product of number and scale, rounded to fp32, as transformers' dequantization computes it.
    """

    file: str  # that has the numbers
    dtype: str  # in which exports have it
    shape: tuple[int, ...]
    stored: tuple[str, str]  # names of the numbers and of the scales [⌈out / rows⌉, ⌈in / columns⌉]
    block: tuple[int, int]  # rows and columns
    axes: int  # of the scales; those of a whole matrix may have none, or one

    def read(self, read: ReadStored, index: Index) -> Tensor:
        """A slice, in fp32."""
        *expert, rows, columns = index
        numbers, scales = self.stored
        (first, of_rows), (second, of_columns) = _blocks(rows, self.block[0]), _blocks(columns, self.block[1])
        place = (*expert, first, second)
        shape = [each.stop - each.start for each in (first, second)]
        of_blocks = read(scales, place[len(place) - self.axes :]).float().reshape(shape)
        return read(numbers, index).float().mul_(of_blocks[of_rows][:, of_columns])


class Mxfp4Tensor(NamedTuple):
    """A matrix of each expert [E, in, out] in MXFP4 (OCP Microscaling 1.0): e2m1 numbers with a scale, a power of two,
    for each 32 of them along `in`.

    The files have the transposed matrices: blocks [E, out, in / 32, 16], two numbers in a byte, the first in its low
    bits, and scales [E, out, in / 32], exponents with a bias of 127. All values are exact in fp32 and bf16.
    """

    file: str  # that has the blocks
    dtype: str  # in which exports have it
    shape: tuple[int, ...]
    stored: tuple[str, str]  # names of blocks and scales

    def read(self, read: ReadStored, index: Index) -> Tensor:
        """A slice, in fp32."""
        expert, columns, rows = index
        blocks, scales = self.stored
        groups, _ = _blocks(columns, GROUP)
        numbers = _PAIRS[read(blocks, (expert, rows, groups, slice(0, GROUP // 2))).int()]  # [out, groups, 16, 2]
        factors = _POWERS[read(scales, (expert, rows, groups)).int()]
        values = numbers.flatten(2).mul_(factors[..., None]).flatten(1)
        first = groups.start * GROUP
        return values[:, columns.start - first : columns.stop - first].t()


QuantizedTensor = Fp8Tensor | Mxfp4Tensor
FolderTensor = StoredTensor | QuantizedTensor

_SIGNED = FP4 + tuple(-value for value in FP4)
_PAIRS = torch.tensor([(_SIGNED[byte & 15], _SIGNED[byte >> 4]) for byte in range(256)])
_POWERS = torch.tensor([2.0 ** (exponent - 127) for exponent in range(NAN_EXPONENT)] + [torch.nan])


def _blocks(part: slice, size: int) -> tuple[slice, Tensor]:
    """The blocks of `size` in which positions lie, and for each position its block, counted from the first of them."""
    first = part.start // size
    positions = torch.arange(part.start, part.stop, part.step or 1)
    return slice(first, -(-part.stop // size)), positions // size - first


def method_of(config: dict[str, Any], error: MakeError) -> str | None:
    """The `quant_method` of a folder's weights; None if they are not quantized. UsageError for methods that are not
    read."""
    entry = config.get(CONFIG_ENTRY)
    if not entry:
        return None
    method = as_object(entry)["quant_method"]
    if method != MXFP4 and format_of(entry, error) is None:
        raise error(
            f"config.json: {CONFIG_ENTRY}: quant_method {method!r}: allowed are {', '.join(METHODS)} in fp8, and "
            f"{MXFP4}; take the model's folder in 16 bits, or dequantize this one with the library that wrote it"
        )
    return method


def dtype_of(config: dict[str, Any], error: MakeError) -> str:
    """The type of weights for which no file gives one, as safetensors names it."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in CONFIG_DTYPES:
        raise error(f"config.json: dtype {name!r}: allowed are {', '.join(CONFIG_DTYPES)}")
    return CONFIG_DTYPES[name]


def dequantized(
    tensors: dict[str, StoredTensor], config: dict[str, Any], error: MakeError
) -> Mapping[str, FolderTensor]:
    """The tensors of a folder as a model without quantization has them, by name. UsageError for tensors that do not
    belong together, or whose shapes or types do not."""
    method = method_of(config, error)
    if method is None:
        return tensors
    found: Mapping[str, QuantizedTensor] = (_mxfp4 if method == MXFP4 else _fp8)(tensors, config, error)
    if not found:
        what = f"quant_method {method!r}, but no tensor is quantized; remove the entry"
        raise error(f"config.json: {CONFIG_ENTRY}: {what}")
    hidden = {name for tensor in found.values() for name in tensor.stored}
    if method != MXFP4:
        of_activations = (name for name in tensors if name.rpartition(".")[2] in ACTIVATIONS)
        hidden |= {name for name in of_activations if tensors[name].shape in ONE_SCALE}
    return {name: tensor for name, tensor in tensors.items() if name not in hidden} | dict(found)


def _fp8(tensors: dict[str, StoredTensor], config: dict[str, Any], error: MakeError) -> dict[str, Fp8Tensor]:
    form, dtype, found = format_of(config[CONFIG_ENTRY], error), dtype_of(config, error), {}
    assert form is not None
    suffix, *sizes = form
    for name, tensor in tensors.items():
        scales = name + suffix
        if tensor.dtype != FP8_TYPE:
            if scales in tensors:
                raise error(f"{name} has a {suffix[1:]}, but is of type {tensor.dtype}; allowed is {FP8_TYPE}")
            continue
        if scales not in tensors:
            raise error(f"{scales} is missing, without which {name} of type {FP8_TYPE} cannot be read")
        if len(tensor.shape) not in (2, 3):
            raise error(f"{name} of type {FP8_TYPE} has shape {list(tensor.shape)}; allowed are matrices")
        block = sizes[0] or tensor.shape[-2], sizes[1] or tensor.shape[-1]
        described = "with one scale" if sizes == [None, None] else f"in blocks of {list(block)} (weight_block_size)"
        described = "with one scale for each row" if sizes == [1, None] else described
        found[name] = Fp8Tensor(tensor.file, dtype, tensor.shape, (name, scales), block, len(tensors[scales].shape))
        _check_scales(found[name], tensors[scales], sizes == [None, None], described, error)
    return found


def _check_scales(tensor: Fp8Tensor, scales: StoredTensor, is_whole: bool, described: str, error: MakeError):
    """`is_whole`: a matrix has one scale; `described`: which numbers share one, in words."""
    *experts, rows, columns = tensor.shape
    expected = (*experts, -(-rows // tensor.block[0]), -(-columns // tensor.block[1]))
    name, name_of_scales = tensor.stored
    if scales.shape != expected and not (is_whole and not experts and scales.shape in ONE_SCALE):
        raise error(
            f"{name_of_scales} has shape {list(scales.shape)}; {name} of shape {list(tensor.shape)} {described} needs "
            f"{list(expected)}"
        )
    if scales.dtype not in SCALE_TYPES:
        raise error(f"{name_of_scales} has type {scales.dtype}; allowed are {', '.join(SCALE_TYPES)}")


def _mxfp4(tensors: dict[str, StoredTensor], config: dict[str, Any], error: MakeError) -> dict[str, Mxfp4Tensor]:
    dtype, found = dtype_of(config, error), {}
    for stored, blocks in tensors.items():
        name = stored.removesuffix(MXFP4_BLOCKS)
        base, scales = stored.removesuffix(MXFP4_SCALES), name + MXFP4_SCALES
        if base != stored and base + MXFP4_BLOCKS not in tensors:
            raise error(f"{base + MXFP4_BLOCKS} is missing, to which {stored} belongs")
        if name == stored:
            continue
        if scales not in tensors:
            raise error(f"{scales} is missing, without which {stored} cannot be read")
        if name in tensors:
            raise error(f"has both {name} and {stored}; remove the one that is not the model's")
        _check_blocks(stored, blocks, scales, tensors[scales], error)
        experts, rows, groups, _ = blocks.shape
        found[name] = Mxfp4Tensor(blocks.file, dtype, (experts, groups * GROUP, rows), (stored, scales))
    return found


def _check_blocks(name: str, blocks: StoredTensor, scales_name: str, scales: StoredTensor, error: MakeError):
    if len(blocks.shape) != 4 or blocks.shape[3] != GROUP // 2:
        raise error(
            f"{name} has shape {list(blocks.shape)}; allowed is [experts, rows, groups of {GROUP} values, {GROUP // 2}]"
        )
    if scales.shape != blocks.shape[:3]:
        raise error(f"{scales_name} has shape {list(scales.shape)}; {name} needs {list(blocks.shape[:3])}")
    for each, tensor in ((name, blocks), (scales_name, scales)):
        if tensor.dtype != "U8":
            raise error(f"{each} has type {tensor.dtype}; allowed is U8")
