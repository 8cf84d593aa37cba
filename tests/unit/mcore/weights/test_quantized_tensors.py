"""Slices of quantized tensors: the numbers of transformers and of double precision, bit for bit, across all borders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.mcore.weights.hf.folder import HFFolder
from megarl.mcore.weights.hf.folder_reader import FolderReader, slices_of
from tests.helpers.hf_quantized import MXFP4_CONFIG, from_fp8, from_mxfp4, to_fp8, to_mxfp4

NAME = "model.layers.0.mlp.down_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
SHAPES = {"whole blocks": (96, 160), "borders": (83, 150), "one block": (5, 7), "experts": (3, 83, 150)}


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict) -> HFFolder:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return HFFolder(folder)


def indices(shape: tuple[int, ...]):
    """Random boxes, with steps in the rows of a matrix and in the last axis of experts."""
    drawn = torch.Generator().manual_seed(5)

    def part(size: int, stepped: bool) -> slice:
        start, stop = sorted(torch.randint(0, size + 1, (2,), generator=drawn).tolist())
        step = int(torch.randint(1, 3, (), generator=drawn)) if stepped else 1
        return slice(min(start, size - 1), max(stop, min(start, size - 1) + 1), step)

    for _ in range(60):
        outer = [int(torch.randint(0, size, (), generator=drawn)) for size in shape[:-2]]
        yield (*outer, part(shape[-2], len(shape) == 2), part(shape[-1], len(shape) == 3))
    yield from slices_of(shape, 100)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("kind", SHAPES)
def test_slices_of_fp8(kind, scale_dtype, tmp_path):
    shape, block = SHAPES[kind], [32, 40]
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    numbers, scales = to_fp8(drawn, block, scale_dtype)
    folder = write(
        tmp_path / "m",
        {NAME: numbers, f"{NAME}_scale_inv": scales},
        {"quant_method": "fp8", "weight_block_size": block},
    )
    assert list(folder.weights) == [NAME] and folder.weights[NAME].shape == shape
    expected, reader = from_fp8(numbers, scales, block), FolderReader(folder)
    for index in indices(shape):
        assert reader[NAME][index].equal(expected[index]), index


def test_fp8_is_dequantized_as_transformers_does_it(tmp_path):
    """Both round the product to fp32; rounding it to bf16 at once would differ in a few numbers of a million."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    drawn = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    numbers, scales = to_fp8(drawn, (128, 128))
    folder = write(tmp_path / "m", {NAME: numbers, f"{NAME}_scale_inv": scales}, {"quant_method": "fp8"})
    found = FolderReader(folder)[NAME][0:256, 0:384]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, dtype)
        assert found.to(dtype).equal(theirs), dtype


def test_scales_may_be_in_another_file(tmp_path):
    numbers, scales = to_fp8(torch.randn(64, 64, generator=torch.Generator().manual_seed(4)), (32, 32))
    folder = write(tmp_path / "m", {NAME: numbers}, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    save_file({f"{NAME}_scale_inv": scales}, folder.path / "other.safetensors")
    places = {NAME: "model.safetensors", f"{NAME}_scale_inv": "other.safetensors"}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = FolderReader(HFFolder(folder.path))[NAME][30:34, 0:64]
    assert found.equal(from_fp8(numbers, scales, (32, 32))[30:34])


def test_slices_of_mxfp4_are_those_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    drawn = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 11, 3, 16), generator=drawn).to(torch.uint8)
    scales = torch.randint(40, 200, (2, 11, 3), generator=drawn).to(torch.uint8)
    scales[0, 0], scales[0, 1] = 0, 251  # the smallest, and the largest without overflow
    folder = write(tmp_path / "m", {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}, MXFP4_CONFIG)
    assert list(folder.weights) == [EXPERTS] and folder.weights[EXPERTS].shape == (2, 96, 11)
    expected, reader = from_mxfp4(blocks, scales), FolderReader(folder)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert expected.to(dtype).equal(theirs), dtype
    for index in indices((2, 96, 11)):
        assert reader[EXPERTS][index].equal(expected[index]), index


def test_rounding_to_mxfp4_and_back():
    """The helper of the tests above and of others packs numbers in the order of the format."""
    weight = torch.tensor([0.0, 0.5, -6.0, 3.0] * 8).repeat(1, 1, 1).transpose(1, 2)
    blocks, scales = to_mxfp4(weight)
    assert scales.tolist() == [[[127]]] and blocks[0, 0, 0, :2].tolist() == [0x10, 0x5F]
    assert from_mxfp4(blocks, scales).equal(weight)
