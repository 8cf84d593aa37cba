"""Slices of quantized tensors: the numbers of transformers and of double precision, bit for bit, across all borders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.mcore.weights.hf.folder import FolderReader, HFFolder, slices_of
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import CONFIG, SINGLE, in_order, transposed_experts
from tests.helpers.folders.hf_layouts import build, logprobs
from tests.helpers.folders.hf_prediction import with_prediction
from tests.helpers.folders.hf_quantized import (
    FP8_OF_LIBRARIES,
    MXFP4_CONFIG,
    fp8,
    from_fp8,
    from_mxfp4,
    mxfp4,
    to_fp8,
    to_mxfp4,
    widen_experts,
    write_dequantized,
)
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

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
        assert reader.read(NAME, index).equal(expected[index]), index


def test_fp8_is_dequantized_as_transformers_does_it(tmp_path):
    """Both round the product to fp32; rounding it to bf16 at once would differ in a few numbers of a million."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    drawn = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    numbers, scales = to_fp8(drawn, (128, 128))
    folder = write(tmp_path / "m", {NAME: numbers, f"{NAME}_scale_inv": scales}, {"quant_method": "fp8"})
    found = FolderReader(folder).read(NAME)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, dtype)
        assert found.to(dtype).equal(theirs), dtype


def test_scales_may_be_in_another_file(tmp_path):
    numbers, scales = to_fp8(torch.randn(64, 64, generator=torch.Generator().manual_seed(4)), (32, 32))
    folder = write(tmp_path / "m", {NAME: numbers}, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    save_file({f"{NAME}_scale_inv": scales}, folder.path / "other.safetensors")
    places = {NAME: "model.safetensors", f"{NAME}_scale_inv": "other.safetensors"}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = FolderReader(HFFolder(folder.path)).read(NAME, (slice(30, 34), slice(0, 64)))
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
        assert reader.read(EXPERTS, index).equal(expected[index]), index


def test_rounding_to_mxfp4_and_back():
    """The helper of the tests above and of others packs numbers in the order of the format."""
    weight = torch.tensor([0.0, 0.5, -6.0, 3.0] * 8).repeat(1, 1, 1).transpose(1, 2)
    blocks, scales = to_mxfp4(weight)
    assert scales.tolist() == [[[127]]] and blocks[0, 0, 0, :2].tolist() == [0x10, 0x5F]
    assert from_mxfp4(blocks, scales).equal(weight)


BLOCK = (48, 40)  # divides neither the matrices nor what a rank has of them
WHOLE = (16, 16)  # divides all matrices, which transformers needs
TP2, EP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--expert-model-parallel-size 2"
UNEVEN_PP2 = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
# name -> case, what quantizes its folder, ranks and flags
CASES = {
    "qwen3": ("qwen3", fp8(BLOCK), 2, TP2),
    "qwen3, scales in bf16": ("qwen3", fp8(BLOCK, torch.bfloat16), 1, ""),
    "qwen3_vl": ("qwen3_vl", fp8(BLOCK), 2, TP2),
    "qwen3_vl_moe": ("qwen3_vl_moe", in_order(transposed_experts, fp8(BLOCK)), 2, f"{TP2} {EP2}"),
    "qwen3_moe": ("qwen3_moe", fp8(BLOCK), 2, f"{TP2} {EP2}"),
    **{name: (case, FP8_OF_LIBRARIES[name], 2, flags) for name, case, flags in (
        ("transformers", "qwen3", TP2), ("compressed-tensors", "phi4", UNEVEN_PP2),
        ("compressed-tensors, rows", "glm4_moe", f"{TP2} {EP2}"), ("modelopt", "qwen3_next", f"{TP2} {EP2}"))},
    "deepseek_v3": ("deepseek_v3", fp8(BLOCK), 2, UNEVEN_PP2),
    "deepseek_v3, experts": ("deepseek_v3", fp8(BLOCK), 2, f"{TP2} {EP2}"),
    "gpt_oss": ("gpt_oss", mxfp4, 2, UNEVEN_PP2),
    "gpt_oss, experts": ("gpt_oss", mxfp4, 2, EP2),
    "gpt_oss, sharded": ("gpt_oss", mxfp4, 2, "--use-torch-fsdp2"),
}  # fmt: skip


def write_case(case: str, quantize, tmp_path: Path, block=BLOCK) -> tuple[Path, Path]:
    """A quantized folder, with a prediction layer where the family has one, and the one that it stands for."""
    folder = hf_folders.write_folder(case, tmp_path / "quantized")
    if case == "gpt_oss":
        widen_experts(folder)
    if case == "deepseek_v3":
        with_prediction(folder)
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("*.safetensors"))
    quantize(folder)
    return folder, write_dequantized(folder, plain, block)


def imported(rank: int, folder: Path, plain: Path, flags: str, export: Path) -> tuple[dict, torch.Tensor]:
    """Tensors that differ from the plain folder's, and log-probs; exports."""
    from megarl.mcore.weights.hf.folder_weights import export_weights
    from tools.convert import differing_tensors

    role, groups, model, weights = build(folder, flags, False)
    _, _, _, expected = build(plain, flags, False, load=False)
    export_weights(weights.weight_map, model, groups.pg_collection, export)
    different = differing_tensors(expected.weight_map, model, groups.pg_collection)
    different |= differing_tensors(weights.weight_map, model, groups.pg_collection)
    sequence = [list(range(4, 40))]
    return different, logprobs(model, groups, sequence, role.model_vocab_size(0))[0]


@pytest.mark.parametrize("name", by_default(CASES, ["deepseek_v3, experts", "gpt_oss, experts"]))
def test_a_quantized_folder_is_the_one_that_it_stands_for(name, tmp_path):
    case, quantize, size, flags = CASES[name]
    folder, plain = write_case(case, quantize, tmp_path)
    for different, _ in run_world(imported, size, folder, plain, flags, tmp_path / "out"):
        assert different == {}
    found, expected = load_file(tmp_path / "out" / SINGLE), load_file(plain / SINGLE)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].equal(tensor), key
    written, of_source = (json.loads((each / CONFIG).read_text()) for each in (tmp_path / "out", folder))
    assert written == {name: value for name, value in of_source.items() if name != "quantization_config"} != of_source


@torch.no_grad()
def logprobs_of_transformers(rank: int, folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokens = torch.tensor([list(range(4, 40))])
    return model(tokens).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.mark.long
@pytest.mark.parametrize("case, quantize", [
    ("qwen3", fp8(WHOLE)), ("qwen3_moe", fp8(WHOLE)), ("gpt_oss", mxfp4), ("qwen3", FP8_OF_LIBRARIES["transformers"]),
])  # fmt: skip
def test_transformers_reads_the_same_numbers_from_the_quantized_folder(case, quantize, tmp_path):
    folder, plain = write_case(case, quantize, tmp_path, WHOLE)
    ((_, ours),) = run_world(imported, 1, folder, plain, "", tmp_path / "out")
    (theirs,) = run_world(logprobs_of_transformers, 1, folder)
    (again,) = run_world(logprobs_of_transformers, 1, tmp_path / "out")
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float((ours - again).abs().max()) <= 1e-5
