"""Quantized folders in every layout: the weights, log-probs and exports of the folder that they stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import hf_folders
from tests.helpers.hf_damage import CONFIG, SINGLE, in_order, transposed_experts
from tests.helpers.hf_layouts import build, logprobs
from tests.helpers.hf_prediction import with_prediction
from tests.helpers.hf_quantized import FP8_OF_LIBRARIES, fp8, mxfp4, widen_experts, write_dequantized
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

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


def write(case: str, quantize, tmp_path: Path, block=BLOCK) -> tuple[Path, Path]:
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
    from megarl.mcore.weights.hf.export_weights import export_weights
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
    folder, plain = write(case, quantize, tmp_path)
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
    folder, plain = write(case, quantize, tmp_path, WHOLE)
    ((_, ours),) = run_world(imported, 1, folder, plain, "", tmp_path / "out")
    (theirs,) = run_world(logprobs_of_transformers, 1, folder)
    (again,) = run_world(logprobs_of_transformers, 1, tmp_path / "out")
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float((ours - again).abs().max()) <= 1e-5
