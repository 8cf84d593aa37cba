"""Quantized weights of a folder: what config.json says about them, and which tensors belong together.

fp8 with a scale for each block, row or tensor (`fp8_formats`) and MXFP4 (GPT-OSS) are read as the numbers that they
stand for, slice by slice.
"""

from collections.abc import Mapping
from typing import Any

from megarl.mcore.weights.hf.fp8_formats import (
    ACTIVATIONS,
    CONFIG_ENTRY,
    METHODS,
    Fp8Format,
    MakeError,
    as_object,
    format_of,
)
from megarl.mcore.weights.hf.stored_tensors import (
    GROUP,
    FolderTensor,
    Fp8Tensor,
    Mxfp4Tensor,
    QuantizedTensor,
    StoredTensor,
)

MXFP4 = "mxfp4"
FP8_TYPE, SCALE_TYPES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
ONE_SCALE = ((), (1,))  # shapes of a scale of a whole tensor
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
CONFIG_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


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
    """The tensors of a folder as a model without quantization has them, by name.

    Raises:
        UsageError: tensors that do not belong together, or whose shapes or types do not.
    """
    method = method_of(config, error)
    if method is None:
        return tensors
    found: Mapping[str, QuantizedTensor] = (_mxfp4 if method == MXFP4 else _fp8)(tensors, config, error)
    if not found:
        raise error(
            f"config.json: {CONFIG_ENTRY}: quant_method {method!r}, but no tensor is quantized; remove the entry"
        )
    hidden = {name for tensor in found.values() for name in tensor.stored}
    if method != MXFP4:
        of_activations = (name for name in tensors if name.rpartition(".")[2] in ACTIVATIONS)
        hidden |= {name for name in of_activations if tensors[name].shape in ONE_SCALE}
    return {name: tensor for name, tensor in tensors.items() if name not in hidden} | dict(found)


def _fp8(tensors: dict[str, StoredTensor], config: dict[str, Any], error: MakeError) -> dict[str, Fp8Tensor]:
    form, dtype, found = format_of(config[CONFIG_ENTRY], error), dtype_of(config, error), {}
    assert form is not None
    for name, tensor in tensors.items():
        scales = name + form.scales
        if tensor.dtype != FP8_TYPE:
            if scales in tensors:
                raise error(f"{name} has a {form.scales[1:]}, but is of type {tensor.dtype}; allowed is {FP8_TYPE}")
            continue
        if scales not in tensors:
            raise error(f"{scales} is missing, without which {name} of type {FP8_TYPE} cannot be read")
        _check_scales(name, tensor, scales, tensors[scales], form, error)
        block, axes = form.block_of(tensor.shape), len(tensors[scales].shape)
        found[name] = Fp8Tensor(tensor.file, dtype, tensor.shape, (name, scales), block, axes)
    return found


def _check_scales(
    name: str, tensor: StoredTensor, scales_name: str, scales: StoredTensor, form: Fp8Format, error: MakeError
):
    if len(tensor.shape) not in (2, 3):
        raise error(f"{name} of type {FP8_TYPE} has shape {list(tensor.shape)}; allowed are matrices")
    *experts, rows, columns = tensor.shape
    block = form.block_of(tensor.shape)
    expected = (*experts, -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != expected and not (form.is_whole and not experts and scales.shape in ONE_SCALE):
        how = "with one scale" if form.is_whole else f"in blocks of {list(block)} (weight_block_size)"
        how = "with one scale for each row" if form.rows == 1 and form.columns is None else how
        raise error(
            f"{scales_name} has shape {list(scales.shape)}; {name} of shape {list(tensor.shape)} {how} needs "
            f"{list(expected)}"
        )
    if scales.dtype not in SCALE_TYPES:
        raise error(f"{scales_name} has type {scales.dtype}; allowed are {', '.join(SCALE_TYPES)}")


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
