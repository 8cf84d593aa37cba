"""Quantized weights of a folder: what config.json says about them, and which tensors belong together.

fp8 in blocks (DeepSeek-V3, Qwen3) and MXFP4 (GPT-OSS) are read as the numbers that they stand for, slice by slice.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megarl.errors import UsageError
from megarl.mcore.weights.hf.stored_tensors import (
    GROUP,
    FolderTensor,
    Fp8Tensor,
    Mxfp4Tensor,
    QuantizedTensor,
    StoredTensor,
)

CONFIG_ENTRY = "quantization_config"
FP8, MXFP4 = "fp8", "mxfp4"
DEFAULT_BLOCK = (128, 128)
FP8_TYPE, SCALE_TYPES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
SCALES = "_scale_inv"  # after a tensor's name
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
CONFIG_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

MakeError = Callable[[str], UsageError]


def method_of(config: dict[str, Any], error: MakeError) -> str | None:
    """How a folder's weights are quantized: fp8, mxfp4 or not at all. UsageError for other methods."""
    entry = config.get(CONFIG_ENTRY)
    if not entry:
        return None
    method = entry.get("quant_method") if isinstance(entry, dict) else entry
    if method not in (FP8, MXFP4):
        raise error(
            f"config.json: {CONFIG_ENTRY}: quant_method {method!r}: allowed are {FP8} in blocks and {MXFP4}; take the "
            "model's folder in 16 bits, or dequantize this one with the library that wrote it"
        )
    if method == FP8:
        _block_of(entry, error)
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
    """The tensors of a folder as a model without quantization has them, by name.

    Raises:
        UsageError: tensors that do not belong together, or whose shapes or types do not.
    """
    method = method_of(config, error)
    if method is None:
        return tensors
    found: Mapping[str, QuantizedTensor] = (_fp8 if method == FP8 else _mxfp4)(tensors, config, error)
    if not found:
        raise error(
            f"config.json: {CONFIG_ENTRY}: quant_method {method!r}, but no tensor is quantized; remove the entry"
        )
    hidden = {name for tensor in found.values() for name in tensor.stored}
    return {name: tensor for name, tensor in tensors.items() if name not in hidden} | dict(found)


def _block_of(entry: dict[str, Any], error: MakeError) -> tuple[int, int]:
    block = entry.get("weight_block_size", list(DEFAULT_BLOCK))
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise error(
            f"config.json: {CONFIG_ENTRY}: weight_block_size {block!r}: allowed are two whole numbers above 0, the "
            "rows and columns that have one scale"
        )
    return block[0], block[1]


def _fp8(tensors: dict[str, StoredTensor], config: dict[str, Any], error: MakeError) -> dict[str, Fp8Tensor]:
    block, dtype, found = _block_of(config[CONFIG_ENTRY], error), dtype_of(config, error), {}
    for name, tensor in tensors.items():
        if tensor.dtype != FP8_TYPE:
            if name + SCALES in tensors:
                raise error(f"{name} has a {SCALES[1:]}, but is of type {tensor.dtype}; allowed is {FP8_TYPE}")
            continue
        if name + SCALES not in tensors:
            raise error(f"{name + SCALES} is missing, without which {name} of type {FP8_TYPE} cannot be read")
        _check_scales(name, tensor, tensors[name + SCALES], block, error)
        found[name] = Fp8Tensor(tensor.file, dtype, tensor.shape, (name, name + SCALES), block)
    return found


def _check_scales(name: str, tensor: StoredTensor, scales: StoredTensor, block: tuple[int, int], error: MakeError):
    if len(tensor.shape) not in (2, 3):
        raise error(f"{name} of type {FP8_TYPE} has shape {list(tensor.shape)}; allowed are matrices")
    *experts, rows, columns = tensor.shape
    expected = (*experts, -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != expected:
        raise error(
            f"{name + SCALES} has shape {list(scales.shape)}; {name} of shape {list(tensor.shape)} in blocks of "
            f"{list(block)} (weight_block_size) needs {list(expected)}"
        )
    if scales.dtype not in SCALE_TYPES:
        raise error(f"{name + SCALES} has type {scales.dtype}; allowed are {', '.join(SCALE_TYPES)}")


def _mxfp4(tensors: dict[str, StoredTensor], config: dict[str, Any], error: MakeError) -> dict[str, Mxfp4Tensor]:
    dtype, found = dtype_of(config, error), {}
    for stored, blocks in tensors.items():
        name = stored.removesuffix(MXFP4_BLOCKS)
        scales = tensors.get(name + MXFP4_SCALES)
        if name == stored:
            base = name.removesuffix(MXFP4_SCALES)
            if base != name and base + MXFP4_BLOCKS not in tensors:
                raise error(f"{base + MXFP4_BLOCKS} is missing, to which {name} belongs")
            continue
        if scales is None:
            raise error(f"{name + MXFP4_SCALES} is missing, without which {stored} cannot be read")
        if name in tensors:
            raise error(f"has both {name} and {stored}; remove the one that is not the model's")
        _check_blocks(stored, blocks, name + MXFP4_SCALES, scales, error)
        experts, rows, groups, _ = blocks.shape
        shape = experts, groups * GROUP, rows
        found[name] = Mxfp4Tensor(blocks.file, dtype, shape, (stored, name + MXFP4_SCALES))
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
