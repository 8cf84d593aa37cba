"""Folders of any type: what is refused, in one line, and what the planner takes from the module."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.arguments import parse
from megarl.planning import parameters
from tests.helpers.folders import any_measures, any_types
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import write_lines

LENGTHS = "--max-prompt-length 60 --max-response-length 4 --max-tokens-per-microbatch 256 --global-batch-size 4"
NORM = "model.norm.weight"
CODE = {"auto_map": {"AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
CLASSIFIER = {"architectures": ["GraniteForSequenceClassification"], "num_labels": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "granite"
    any_types.save("granite", path)
    return path


def argv(folder, flags: str = "") -> list[str]:
    prompts = write_lines(folder.parent / "sft.jsonl", [{"prompt": f"{i}?", "answer": str(i)} for i in range(4)])
    return [*f"{LENGTHS} {any_measures.FLAGS} --prompts {prompts} --train-iters 1".split(), *flags.split(),
            "--hf-model", str(folder)]  # fmt: skip


@pytest.mark.parametrize("entries, problem", [
    (CODE, "auto_map: code in a folder is not run, and transformers has no type 'own'"),
    ({"model_type": "nothing"}, "model_type 'nothing': the installed transformers has no such type"),
    ({"model_type": "vit"}, "transformers has no language model (ForCausalLM) of it"),
    ({"hidden_size": "wide"}, "config.json: transformers refuses it"),
    ({"num_attention_heads": 3}, "GraniteForCausalLM cannot run"),
    ({"num_hidden_layers": 0}, "does not call transformers' attention interface"),
    ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1},
     "than with two sequences packed together: it has states, masks or positions beside"),
    ({"model_type": "falcon"}, "FalconForCausalLM does not call transformers' attention interface"),
    (CLASSIFIER, "num_labels 2: allowed is one"),
])  # fmt: skip
def test_a_model_that_does_not_run_is_refused(entries, problem, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "folder")
    config = tmp_path / "folder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    assert f"--hf-model {tmp_path}/folder: " in (line := refusal(argv(tmp_path / "folder"), "sft")) and problem in line


@pytest.mark.parametrize("change, problem", [
    (lambda held: held.pop(NORM), f"{NORM} is missing, which GraniteForCausalLM of transformers needs"),
    (lambda held: held.update(odd=torch.zeros(2)), "odd is a tensor that GraniteForCausalLM does not have"),
    (lambda held: held.update({NORM: torch.zeros(3)}), "the shape [3]; config.json describes [64]"),
    (lambda held: held.update({NORM: torch.zeros(64, dtype=torch.int32)}), "has type I32; allowed are F32"),
])  # fmt: skip
def test_other_tensors_are_refused(change, problem, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file)
    assert problem in refusal(argv(tmp_path / "folder"), "sft")


@pytest.mark.parametrize("flags, problem", [
    ("--model-source megatron", "--model-source transformers computes others"),
    ("--model-source torch", "--model-source torch: allowed is one of megatron, transformers"),
    ("--fp16", "--fp16 True: with --model-source transformers allowed is none"),
    ("--num-layers 3", "--num-layers: the modules of transformers that compute --hf-model"),
])  # fmt: skip
def test_flags_are_refused(flags, problem, folder):
    assert problem in refusal(argv(folder, flags), "sft")


def test_a_source_needs_a_folder(folder):
    line = refusal(argv(folder)[:-2], "sft")
    assert "--model-source transformers: needs --hf-model, whose model it computes" in line


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_planner_counts_the_modules_parameters(ranks, folder):
    module = any_types.small_module("granite")
    config = parse(argv(folder, f"--tensor-model-parallel-size {ranks}"), ranks, "sft")
    args, weights = config.roles["actor"].megatron, dict(module.named_parameters())
    whole = sum(each.numel() for each in weights.values())
    norms = sum(each.numel() for each in weights.values() if each.dim() == 1)
    totals = parameters.parameter_totals(args, 160, False)
    assert totals == (whole, whole, norms + (whole - norms) // ranks)
