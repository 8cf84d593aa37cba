"""Configs of adapters: the first pattern that matches a module's name counts; damaged folders are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megarl import plain_files
from megarl.errors import UsageError
from megarl.mcore.lora.peft_config import CONFIG, read_config, stored_settings
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import role_of

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 4, "use_rslora": False}
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "self_attn.*": 16, "k": 3},
    "alpha_pattern": {r"layers\.1\..*": 12, "v_proj": 6},
}


@pytest.mark.parametrize(
    "name, rank, alpha",
    [
        (None, 8, 4),
        ("model.layers.0.mlp.up_proj", 8, 4),
        ("model.layers.0.self_attn.q_proj", 2, 4),  # the first pattern of two that match
        ("model.layers.0.self_attn.k_proj", 16, 4),  # a pattern matches whole names alone
        ("model.layers.1.self_attn.v_proj", 16, 12),
        ("model.layers.0.self_attn.v_proj", 16, 6),
    ],
)
def test_the_first_pattern_that_matches_a_name_counts(name, rank, alpha):
    found = stored_settings(PLAIN | PATTERNS, name)
    assert (found.rank, found.alpha, found.scale) == (rank, alpha, alpha / rank)


def test_a_config_is_read_as_it_is_and_a_wrong_entry_is_named(tmp_path):
    for config, says in ((PLAIN, None), (PLAIN | {"r": True}, "r is True"), ({"r": 8}, "describes no LoRA adapter")):
        (tmp_path / CONFIG).write_text(json.dumps(config))
        if says is None:
            assert read_config(tmp_path, UsageError) == config
        else:
            with pytest.raises(UsageError, match=says):
                read_config(tmp_path, UsageError)


WEIGHTS, LAYER = "adapter_model.safetensors", "base_model.model.model.layers.0."
Q, EMBEDDING = f"{LAYER}self_attn.q_proj.lora_A.weight", "base_model.model.model.embed_tokens.lora_embedding_A"
SCORE, CONV = "base_model.model.score.weight", f"{LAYER}linear_attn.conv1d.lora_{{}}.weight"
FIT = "model.layers.0.self_attn.q_proj has factors of shapes"
# What is changed in the config or the tensors, or files and their new content (None: removed); what the error says.
DAMAGES = {
    "no config": ([(CONFIG, None)], f"{CONFIG} is missing"),
    "no weights": ([(WEIGHTS, None)], f"{WEIGHTS} is missing"),
    "pickled": ([(WEIGHTS, None), ("adapter_model.bin", b"")], f"{WEIGHTS} is missing; adapter_model.bin is not read"),
    "not JSON": ([(CONFIG, b"{")], f"{CONFIG} cannot be read"),
    "cut weights": ([(WEIGHTS, b"12")], "is no readable safetensors file"),
    "another method": ({"peft_type": "IA3"}, "describes no LoRA adapter"),
    "DoRA": ({"use_dora": True}, "use_dora is not supported"),
    "trained biases": ({"bias": "all"}, "trains biases (bias 'all'); train with bias none, or merge the adapter into"),
    "modules": ({"modules_to_save": ["lm_head", "score"]}, "trains whole modules (modules_to_save lm_head); train"),
    "KaSA": ({"kasa_config": {"beta": 1e-4}}, "kasa_config is not supported: factors may compute something else"),
    "an entry of a later PEFT": ({"use_later": True}, "use_later is not supported"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "changes the weights under the factors"),
    "no rank": ({"r": None}, "r and lora_alpha are missing"),
    "a rank of text": ({"r": "8"}, "r is '8'; it must be a whole number above 0"),
    "no scale": ({"lora_alpha": 0}, "lora_alpha is 0; it must be a number above 0"),
    "scales of text": ({"alpha_pattern": {"q_proj": "x"}}, "it must be numbers above 0 by pattern"),
    "no pattern": ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '(' is no regular expression"),
    "a nested pattern": ({"alpha_pattern": {"(" * 3000 + ")" * 3000: 1}}, "is no regular expression"),
    "a rank that no factor has": ({"r": 10**9}, f"q_proj has factors of rank 4, but {CONFIG} says 1000000000"),
    "ranks by pattern": ({"rank_pattern": {"q_proj": 2}}, f"q_proj has factors of rank 4, but {CONFIG} says 2"),
    "ranks of text": ({"rank_pattern": {"q_proj": "4"}}, "it must be whole numbers above 0 by pattern"),
    "an endless pattern": ({"alpha_pattern": {"([a-z_.0-9]+)+#": 1}}, "takes more than 1 s, or 1 GiB of memory, to"),
    "a number of modules": ({"modules_to_save": 5}, "modules_to_save is 5; it must be a list of names"),
    "a long name": ({"init_lora_weights": "x" * 10**6}, "…"),
    "a deep config": ([(CONFIG, b"[" * 10**5)], f"{CONFIG} cannot be read"),
    "a number for a matrix": (lambda t: {Q: torch.tensor(1.0)}, "q_proj.lora_A.weight is float32 []; factors are"),
    "whole numbers": (lambda t: {Q: t[Q].int()}, "q_proj.lora_A.weight is int32 [4, 64]; factors are matrices of"),
    "no number": (lambda t: {Q: t[Q].fill_(float("nan"))}, "q_proj.lora_A.weight has a NaN or an infinity"),
    "an infinity": (lambda t: {Q: t[Q].index_fill(1, torch.tensor(3), float("inf"))}, "has a NaN or an infinity"),
    "an embedding's": (lambda t: {EMBEDDING: t[Q]}, "have no factors in megarl: model.embed_tokens; train"),
    "a whole embedding": (lambda t: {EMBEDDING.replace("lora_embedding_A", "weight"): t[Q]}, "embed_tokens"),
    "a bias": (lambda t: {Q.replace("lora_A.weight", "base_layer.bias"): t[Q][0]}, "base_layer.bias is not one"),
    "a convolution": (lambda t: {CONV.format(x): t[Q][None] for x in "AB"}, "layers.*.linear_attn.conv1d; train"),
    "two files in one": (lambda t: {Q.replace("q_proj", "q_proj.q_proj"): t[Q]}, "lora_A.weight is not one of"),
    "a stack": (lambda t: {Q: t[Q][None]}, "q_proj.lora_A.weight is float32 [1, 4, 64]; factors"),
    "a head of two labels": (lambda t: {SCORE: t[Q][:2]}, "score.weight is [2, 64]; a scalar head is [1, 64]"),
    "a head of no number": (lambda t: {SCORE: t[Q][:1] / 0}, "score.weight has a NaN or an infinity"),
    "a head": (lambda t: {SCORE: t[Q][:1]}, "has a scalar head (score.weight), which the actor has not"),
    "a wrong rank": (lambda t: {Q: t[Q][:2]}, FIT),
    "wrong columns": (lambda t: {Q: t[Q][:, :3]}, FIT),
    "half of a pair": (lambda t: {Q: None}, "q_proj.lora_B.weight is not one of a pair"),
    "nothing": (lambda t: dict.fromkeys(t), "has no factors"),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return hf_folders.write_folder("llama3", tmp_path_factory.mktemp("folder") / "llama3")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_adapters_are_refused_in_one_line(damage, model_folder, tmp_path, monkeypatch):
    change, says = DAMAGES[damage]
    if damage == "an endless pattern":
        monkeypatch.setattr(plain_files, "CHILD_SECONDS", 1)
    config = PLAIN | {"r": 4, "target_modules": ["q_proj"]} | (change if isinstance(change, dict) else {})
    (tmp_path / CONFIG).write_text(json.dumps(config))
    tensors = {Q: torch.randn(4, 64), Q.replace("lora_A", "lora_B"): torch.randn(64, 4)}
    changed = tensors | (change(tensors) if callable(change) else {})
    save_file(
        {n: tensor.clone().contiguous() for n, tensor in changed.items() if tensor is not None}, tmp_path / WEIGHTS
    )
    for name, content in change if isinstance(change, list) else ():
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        role_of(model_folder, f"--lr 1e-3 --lora-adapter {tmp_path}", 1, False)
    assert str(error.value).startswith(f"--lora-adapter {tmp_path}: ") and says in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 2000
