"""Folders of any type: what is refused, in one line, and what the planner takes from the module."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.arguments import parse
from megarl.mcore.any_model import source
from megarl.mcore.any_model.module_map import Conversions
from megarl.planning import parameters
from tests.helpers.folders import any_measures, any_types
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import write_lines
from tests.helpers.tiers import by_default

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


# -- conversions: tensors of a folder become the weights of the module, and back, however folders store them -----------


# Experts stored one by one; names that the class no longer has; heads that are embeddings; buffers.
KINDS = ("qwen3_moe", "mixtral", "ernie4_5_moe", "gemma2", "gpt2", "gemma4_text", "longcat_flash", "gpt_oss")


def read(folder):
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def conversions_of(folder, tensors):
    config = json.loads((folder / "config.json").read_text())
    found = source.of_config(source.CONFIG_MAPPING[config["model_type"]].from_dict(config))
    module = found.module(torch.float32)
    return Conversions(module, {name: tuple(each.shape) for name, each in tensors.items()})


@pytest.mark.parametrize("kind", by_default(KINDS, ("qwen3_moe", "gemma2")))
def test_weights_are_those_of_the_module_and_become_the_same_tensors(kind, tmp_path):
    module = any_types.save(kind, tmp_path / kind)
    tensors = read(tmp_path / kind)
    found = conversions_of(tmp_path / kind, tensors)
    assert found.missing == found.unknown == []
    written = {}
    for group in found.groups:
        made = group.made(tensors.__getitem__, found.module)
        assert {name: tuple(each.shape) for name, each in made.items()} == group.weights
        for name, each in made.items():
            assert torch.equal(each, module.state_dict()[name])
        written |= found.reverted(made)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(each, tensors[name]) for name, each in written.items())


def test_experts_are_stored_one_by_one(tmp_path):
    any_types.save("qwen3_moe", tmp_path / "one")
    found = conversions_of(tmp_path / "one", read(tmp_path / "one"))
    (group,) = (each for each in found.groups if "model.layers.0.mlp.experts.gate_up_proj" in each.weights)
    assert len(group.sources) == 8 and "model.layers.0.mlp.experts.3.up_proj.weight" in group.sources


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_tied_head_may_be_stored(is_stored, tmp_path):
    any_types.save("gemma2", tmp_path / "tied")
    tensors = read(tmp_path / "tied")
    assert "lm_head.weight" not in tensors
    if is_stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    found = conversions_of(tmp_path / "tied", tensors)
    assert found.missing == found.unknown == []
    assert {name for group in found.groups for name in group.sources} == tensors.keys()


# A folder may hold keys and values of layers that take those of others: transformers' classes ignore them by name.
@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_tensors_that_transformers_does_not_read_are_kept(kind, tmp_path):
    any_types.save(kind, tmp_path / kind)
    tensors = read(tmp_path / kind)
    names = [f"model.layers.5.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    assert "model.layers.3.self_attn.k_proj.weight" in tensors and not tensors.keys() & {*names}
    found = conversions_of(tmp_path / kind, tensors | dict.fromkeys(names, torch.zeros(32, 64)))
    assert found.missing == found.unknown == [] and found.unused == {*names}
    of_another = names[0].replace(".5.", ".3.").replace("k_proj", "g_proj")
    assert conversions_of(tmp_path / kind, tensors | {of_another: torch.zeros(1)}).unknown == [of_another]


def test_missing_and_unknown_tensors_are_named(tmp_path):
    any_types.save("gemma2", tmp_path / "wrong")
    tensors = read(tmp_path / "wrong")
    tensors["model.layers.6.mlp.up_proj.weight"] = tensors.pop("model.layers.5.mlp.up_proj.weight")
    found = conversions_of(tmp_path / "wrong", tensors)
    assert found.missing == ["model.layers.5.mlp.up_proj.weight"]
    assert found.unknown == ["model.layers.6.mlp.up_proj.weight"]
