"""What kind of model a folder holds: its type, its head, and experts as transformers may store them."""

import json

import pytest
from safetensors.torch import load_file, save_file

from megarl.checkpoint.pretrained import folder_weights
from megarl.errors import UsageError
from megarl.mcore.weights.hf.hf_model import command_line, read_model
from tests.helpers.folders.hf_folders import reference, write_folder
from tests.helpers.folders.hf_layouts import role_of


def model_of(tmp_path, case: str = "qwen3", **entries):
    (tmp_path / "config.json").write_text(json.dumps(reference(case).config | entries))
    return read_model(str(tmp_path), "--hf-model", 64)


@pytest.mark.parametrize("entries, says", [
    ({"model_type": "bert"}, "model_type 'bert': allowed are afmoe, arcee, "),
    ({"model_type": ["qwen3"]}, "model_type ['qwen3']: allowed are "),
    ({"architectures": ["Qwen3Model"]}, "architectures ['Qwen3Model']: allowed is …ForCausalLM and "),
    ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}, "num_labels 3: allowed is one, the score"),
])  # fmt: skip
def test_what_is_no_policy_and_no_reward_model_is_refused(entries, says, tmp_path):
    with pytest.raises(UsageError) as error:
        model_of(tmp_path, **entries)
    assert str(error.value).startswith(f"--hf-model {tmp_path}: config.json: {says}")


def test_flags_are_tokens_and_switches_have_no_value(tmp_path):
    model = model_of(tmp_path)
    tokens = command_line(model.flags)
    assert "--qk-layernorm" in tokens and tokens[tokens.index("--num-layers") + 1].isdigit()
    assert ("--untie-embeddings-and-output-weights" in tokens) == (not reference("qwen3").config["tie_word_embeddings"])
    assert not model.has_scalar_head and not model.stores_tied_head and model.notes == ()


def test_a_head_of_one_label_is_scalar_and_never_tied(tmp_path):
    entries = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "tie_word_embeddings": True}
    model = model_of(tmp_path, **entries)
    assert model.has_scalar_head and "--untie-embeddings-and-output-weights" in command_line(model.flags)


def test_an_export_of_a_multimodal_folder_needs_its_other_parts(tmp_path):
    model = model_of(tmp_path, "qwen3_vl")
    for value_head, says in ((True, "scalar head"), (False, "without weights")):
        with pytest.raises(UsageError, match=says):
            model.check_exportable(value_head)


@pytest.mark.parametrize("name", ["mlp", "block_sparse_moe"])
def test_dense_layers_of_kimi_linear_have_the_name_of_either_writer(name, tmp_path):
    """Moonshot's folders call them `mlp`; transformers stores them under the name of the layers with experts."""
    file = write_folder("kimi_linear", tmp_path / "folder") / "model.safetensors"
    stored = {key.replace("layers.0.block_sparse_moe.", f"layers.0.{name}."): x for key, x in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    expected = folder_weights(role_of(file.parent, "", 1, False)).weight_map.expected()
    assert expected.keys() == stored.keys() and f"model.layers.0.{name}.up_proj.weight" in expected


@pytest.mark.parametrize("entries, says", [
    ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "one without gate_lower_bound and use_full_rank_gate"),
    ({"mla_use_output_gate": True}, "mla_use_output_gate True: allowed is False or absent"),
    ({"mla_use_nope": False}, "mla_use_nope False: allowed is True or absent"),
    ({"layer_types": ["linear_attention"] * 4}, "a list of 4 words, linear_attention or full_attention, both of them"),
])  # fmt: skip
def test_other_layers_of_kimis_type_are_refused(entries, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        model_of(tmp_path, "kimi_linear", **entries)
