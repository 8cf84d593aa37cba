"""Damaged weights and tokenizers in Hugging Face folders: exit status 2 and one line that says what is wrong."""

import json
import os
import struct

import pytest
import torch

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import (
    FIRST,
    INDEX,
    SECOND,
    SINGLE,
    add,
    config,
    cut,
    deeper_than_config,
    drop,
    edit,
    in_order,
    index,
    line_of,
    loop,
    pickle_only,
    remove,
    replace,
    smaller_vocabulary,
    tensors,
    text,
    without,
)
from tests.helpers.tiers import by_default

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
A_LOG, DT_BIAS = "model.layers.1.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias"
UNREADABLE, QUANTIZED = "is no readable safetensors file", "belongs to quantized weights"
AFTER = "after those of config.json"
ELSEWHERE = "model.layers.0.input_layernorm.weight"
FP8 = torch.float8_e4m3fn
TEMPLATE = "chat_template.jinja"


def set_number(name: str, value: float):
    """Damage: the second number of a vector."""

    def change(held: dict[str, torch.Tensor]):
        held[name][1] = value

    return tensors(change)


def another_row(held: dict[str, torch.Tensor]):
    """A head that differs from the embedding in one row."""
    held[HEAD] = held["model.embed_tokens.weight"].clone()
    held[HEAD][77, 5] += 1


def headed(entries: dict[str, tuple[list[int], int, int]], size: int):
    """Damage: a weight file of `size` zeros, whose header says shape, begin and end of each tensor."""
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        for name, (shape, begin, end) in entries.items()
    }
    content = json.dumps(header).encode()
    return text(SINGLE, struct.pack("<Q", len(content)) + content + bytes(size))


# name -> damage to a llama of one weight file, what the line must contain
FILES = {
    "no weights": (remove(SINGLE), [f"{SINGLE} and {INDEX} are missing"]),
    "pickles alone": (pickle_only, ["pytorch_model.bin is a pickle: convert it to safetensors"]),
    "empty": (text(SINGLE, ""), [f"{SINGLE} {UNREADABLE}"]),
    "garbage": (text(SINGLE, b"\x89garbage" * 500), [f"{SINGLE} {UNREADABLE}"]),
    "half a length": (cut(SINGLE, 4), [f"{SINGLE} {UNREADABLE}"]),
    "half a header": (cut(SINGLE, 100), [f"{SINGLE} {UNREADABLE}"]),
    "half the data": (cut(SINGLE, -5000), [f"{SINGLE} {UNREADABLE}"]),
    "a byte short": (cut(SINGLE, -1), [f"{SINGLE} {UNREADABLE}"]),
    "header no JSON": (text(SINGLE, struct.pack("<Q", 8) + b"{{{{}}}}"), [f"{SINGLE} {UNREADABLE}"]),
    "header too long": (text(SINGLE, struct.pack("<Q", 2**60) + b"{}"), [f"{SINGLE} {UNREADABLE}"]),
    "tensors that overlap": (headed({"a": ([2], 0, 8), "b": ([2], 4, 12)}, 12), [UNREADABLE]),
    "a tensor that ends before it begins": (headed({"a": ([2], 8, 0)}, 8), [UNREADABLE]),
    "a tensor beyond the end": (headed({"a": ([2**30], 0, 2**32)}, 8), [UNREADABLE]),
    "a tensor before the beginning": (headed({"a": ([2], -8, 0)}, 8), [UNREADABLE]),
    "a hole": (headed({"a": ([2], 0, 8), "b": ([2], 16, 24)}, 24), [UNREADABLE]),
    "a tail": (headed({"a": ([2], 0, 8)}, 1000), [UNREADABLE]),
    "a shape of other bytes": (headed({"a": ([3], 0, 8)}, 8), [UNREADABLE]),
    "a shape too large for a number": (headed({"a": ([2**62, 4], 0, 8)}, 8), [UNREADABLE]),
    "a deep header": (text(SINGLE, struct.pack("<Q", 2 * 10**6) + b"[" * 10**6 + b"]" * 10**6), [UNREADABLE]),
    "a pipe": (in_order(remove(SINGLE), lambda folder: os.mkfifo(folder / SINGLE)), [f"{SINGLE} is missing"]),
    "no tensors": (text(SINGLE, struct.pack("<Q", 2) + b"{}"), ["model.embed_tokens.weight is missing"]),
    "a folder": (in_order(remove(SINGLE), lambda folder: (folder / SINGLE).mkdir()), [f"{SINGLE} is missing"]),
    "unreadable": (loop(SINGLE), [f"{SINGLE} and {INDEX} are missing"]),
    "two models": (text(INDEX, '{"weight_map": {"a": "b"}}'), [f"both {INDEX} and {SINGLE}"]),
    "missing tensor": (drop(DOWN), [f"{DOWN} is missing, which config.json needs"]),
    "missing norm": (drop("model.norm.weight"), ["model.norm.weight is missing"]),
    "extra tensor": (add("model.layers.0.self_attn.inv_freq", torch.ones(8)), ["inv_freq is a tensor that"]),
    "extra of two lines": (add("model.x\ny", torch.ones(8)), [r"model.x\ny is a tensor that"]),
    "bias": (add("model.layers.0.self_attn.q_proj.bias", torch.ones(64)), ["q_proj.bias is a tensor that"]),
    "adapter": (add("base_model.model.lora_A.weight", torch.ones(8, 64)), ["lora_A.weight is a tensor that"]),
    "layer beyond the last": (add("model.layers.3.enorm.weight", torch.ones(64)), ["model.layers.3.enorm", AFTER]),
    "layer beyond the default": (in_order(without("num_hidden_layers"), tensors(deeper_than_config)),
                                 ["model.layers.32.", AFTER]),
    "layer with no number": (add("model.layers.x.weight", torch.ones(64)), ["model.layers.x.weight is a tensor that"]),
    "layer with no name": (add("model.layers.", torch.ones(64)), ["model.layers. is a tensor that"]),
    "fewer layers": (config(num_hidden_layers=2), ["model.layers.2.", AFTER]),
    "more layers": (config(num_hidden_layers=4), ["model.layers.3.", "is missing"]),
    "narrow": (replace(Q, lambda w: w[:, :63]), [f"{Q} has shape [64, 63]; config.json describes [64, 64]"]),
    "short": (replace(Q, lambda w: w[:48]), [f"{Q} has shape [48, 64]"]),
    "long": (replace(Q, lambda w: torch.cat([w, w])), [f"{Q} has shape [128, 64]"]),
    "transposed": (replace(DOWN, lambda w: w.T), [f"{DOWN} has shape [128, 64]; config.json describes [64, 128]"]),
    "flat": (replace(DOWN, lambda w: w.flatten()), [f"{DOWN} has shape [8192]"]),
    "scalar": (replace("model.norm.weight", lambda w: w[0]), ["model.norm.weight has shape []"]),
    "empty tensor": (replace(Q, lambda w: w[:0]), [f"{Q} has shape [0, 64]"]),
    "one more token": (config(vocab_size=129), ["embed_tokens.weight has shape [128, 64]", "[129, 64]"]),
    "head of its own": (replace(HEAD, lambda w: w[:100]), [f"{HEAD} has shape [100, 64]"]),
    "integers": (replace(Q, lambda w: w.to(torch.int8)), [f"{Q} has type I8; allowed are F32, BF16, F16"]),
    "double precision": (replace(Q, lambda w: w.double()), [f"{Q} has type F64; allowed are F32, BF16, F16"]),
    "eight bits": (replace(Q, lambda w: w.to(FP8)), [f"{Q} has type F8_E4M3; allowed are F32, BF16, F16"]),
    "booleans": (replace(Q, lambda w: w > 0), [f"{Q} has type BOOL; allowed are F32, BF16, F16"]),
    "scales": (add(f"{Q}_scale_inv", torch.ones(1, 1)), [f"{Q}_scale_inv {QUANTIZED}", "does not describe"]),
    "packed integers": (add(Q.replace("weight", "qweight"), torch.ones(8, 64, dtype=torch.int32)), [QUANTIZED]),
    "tied, with another head": (config(tie_word_embeddings=True), [f"ties {HEAD}", "but row 0 differs"]),
    "tied, with a head of another row": (in_order(config(tie_word_embeddings=True), tensors(another_row)),
                                         [f"ties {HEAD}", "but row 77 differs"]),
    "untied, without a head": (in_order(drop(HEAD), config(tie_word_embeddings=False)), [f"{HEAD} is missing"]),
}  # fmt: skip

# The same for a folder of two weight files.
INDICES = {
    "missing file": (remove(SECOND), [f"{SECOND} is missing"]),
    "index alone": (in_order(remove(FIRST), remove(SECOND)), [f"{FIRST} is missing"]),
    "files without an index": (remove(INDEX), [f"{SINGLE} and {INDEX} are missing"]),
    "garbage file": (text(SECOND, b"garbage"), [f"{SECOND} {UNREADABLE}"]),
    "half a file": (cut(FIRST, -2000), [f"{FIRST} {UNREADABLE}"]),
    "index empty": (text(INDEX, ""), [f"{INDEX} is not JSON"]),
    "index no object": (text(INDEX, "3"), [f"{INDEX} holds no JSON object"]),
    "index unreadable": (loop(INDEX), [f"{INDEX} cannot be read"]),
    "no weight_map": (text(INDEX, "{}"), [f"{INDEX} has no weight_map"]),
    "empty weight_map": (index(lambda names: {}), [f"{INDEX} has no weight_map"]),
    "weight_map a list": (index(list), [f"{INDEX} has no weight_map"]),
    "weight_map of numbers": (index(lambda names: dict.fromkeys(names, 1)), [f"{INDEX} has no weight_map"]),
    "file outside": (index(lambda names: names | {ELSEWHERE: f"../{FIRST}"}), ["which is no file of this folder"]),
    "absolute file": (index(lambda names: names | {ELSEWHERE: "/etc/passwd"}), ["which is no file of this folder"]),
    "folder above": (index(lambda names: names | {ELSEWHERE: ".."}), [".. is missing"]),
    "file of two lines": (index(lambda names: names | {ELSEWHERE: "a\nb"}), [r"a\nb is missing"]),
    "file with no end": (index(lambda names: names | {ELSEWHERE: "a\0b"}), [r"a\x00b"]),
    "wrong file": (index(lambda names: names | {ELSEWHERE: SECOND}), [f"puts {ELSEWHERE} into {SECOND}", "not hold"]),
    "not in its file": (tensors(lambda held: held.pop(ELSEWHERE), FIRST), [f"puts {ELSEWHERE} into", "not hold"]),
    "in both files": (tensors(lambda held: held.update({ELSEWHERE: torch.ones(64)}), SECOND), ["holds", FIRST]),
}

# case -> the same
FAMILIES = {
    "smollm2": {"head of an untied one": (add(HEAD, torch.ones(128, 96)), [f"ties {HEAD}", "row 0 differs"])},
    "qwen3": {"missing norm": (drop("model.layers.1.self_attn.k_norm.weight"), ["self_attn.k_norm.weight is missing"])},
    "qwen2": {"missing bias": (drop("model.layers.1.self_attn.k_proj.bias"), ["self_attn.k_proj.bias is missing"])},
    "phi4": {"separate tensors": (add(Q, torch.ones(64, 64)), [f"{Q} is a tensor that megarl does not know"])},
    "mixtral": {
        "missing expert": (drop("model.layers.2.block_sparse_moe.experts.3.w3.weight"), ["3.w3.weight is missing"]),
        "more experts": (config(num_local_experts=16), ["block_sparse_moe.gate.weight has shape"]),
        "fewer experts": (config(num_local_experts=2), ["block_sparse_moe.gate.weight has shape"]),
    },
    "glm4_moe": {
        "missing bias": (drop("model.layers.2.mlp.gate.e_score_correction_bias"), ["correction_bias is missing"]),
        "two layers of prediction": (add("model.layers.5.eh_proj.weight", torch.ones(64, 128)), [AFTER]),
        "other dense layers": (config(first_k_dense_replace=2), ["model.layers.1.mlp"]),
    },
    "qwen3_next": {
        "infinite decay": (set_number(A_LOG, float("inf")), [f"{A_LOG} in {SINGLE} holds a number that is not finite"]),
        "no decay": (drop(A_LOG), [f"{A_LOG} is missing"]),
        "decays of another count": (replace(A_LOG, lambda w: w[:3]), [f"{A_LOG} has shape [3]"]),
    },
    "qwen35_dense": {
        "NaN": (in_order(set_number(DT_BIAS, float("nan")), set_number(A_LOG, float("-inf"))),
                [f"{DT_BIAS} in {SINGLE} holds a number that is not finite, as 1 other tensors do"]),
    },
    "llama_reward": {
        "no score": (drop("score.weight"), ["score.weight is missing"]),
        "two scores": (replace("score.weight", lambda w: torch.cat([w, w])), ["score.weight has shape [2, 64]"]),
        "bias": (add("score.bias", torch.ones(1)), ["score.bias is a tensor that megarl does not know"]),
    },
}  # fmt: skip

TOKENIZERS = {
    "missing": (remove("tokenizer.json"), ["tokenizer.json", "no such file"]),
    "a pipe": (in_order(remove("tokenizer.json"), lambda folder: os.mkfifo(folder / "tokenizer.json")),
               ["tokenizer.json: cannot be read (is no regular file)"]),
    "a device": (in_order(remove("tokenizer.json"), lambda folder: (folder / "tokenizer.json").symlink_to("/dev/zero")),
                 ["tokenizer.json: cannot be read (is no regular file)"]),
    "configuration a pipe": (in_order(remove("tokenizer_config.json"),
                                      lambda folder: os.mkfifo(folder / "tokenizer_config.json")),
                             ["tokenizer_config.json: cannot be read (is no regular file)"]),
    "empty": (text("tokenizer.json", ""), ["tokenizer.json", "malformed JSON"]),
    "no tokenizer": (text("tokenizer.json", "{}"), ["transformers cannot read the tokenizer"]),
    "a list": (text("tokenizer.json", "[]"), ["tokenizer.json", "expected a JSON object"]),
    "no vocabulary": (edit("tokenizer.json", lambda content: content | {"model": None}), ["cannot read the tokenizer"]),
    "configuration no JSON": (text("tokenizer_config.json", "{"), ["tokenizer_config.json", "malformed JSON"]),
    "EOS a number": (edit("tokenizer_config.json", lambda content: content | {"eos_token": 2}), ["either str or"]),
    "added token a number": (edit("tokenizer.json", lambda content: content | {"added_tokens": [1]}),
                             ["transformers cannot read the tokenizer"]),
    "end id outside": (edit("generation_config.json", lambda content: content | {"eos_token_id": [2, 120]}),
                       ["eos_token_id 120", "not in the vocabulary"]),
    "end id a text": (edit("generation_config.json", lambda content: content | {"eos_token_id": "2"}),
                      ["eos_token_id '2'", "not in the vocabulary"]),
    "end id a list": (edit("generation_config.json", lambda content: content | {"eos_token_id": [[2]]}),
                      ["eos_token_id [2]", "not in the vocabulary"]),
    "generation no JSON": (text("generation_config.json", "{"), ["generation_config.json", "malformed JSON"]),
    "more tokens than the model": (smaller_vocabulary(90), ["vocab_size 90", "ids up to 99"]),
    "template without an end": (text(TEMPLATE, "{% for m in messages %}"), ["chat template: malformed Jinja"]),
    "template of an unknown filter": (text(TEMPLATE, "{{ messages | nothing }}"), ["malformed Jinja", "nothing"]),
    "template that fails": (text(TEMPLATE, "{{ messages[9].content }}"), ["the template fails"]),
    "template that refuses": (text(TEMPLATE, "{{ raise_exception('not these') }}"), ["the template fails", "these"]),
    "template without EOS": (text(TEMPLATE, "{% for m in messages %}{{ m.content }}{% endfor %}"), ["without", "EOS"]),
    "template not UTF-8": (text(TEMPLATE, b"\xff"), ["chat_template.jinja: cannot be read (it is not UTF-8: byte 0)"]),
}  # fmt: skip


def refused(tmp_path, case, files, damage, needles):
    folder = hf_folders.write_folder(case, tmp_path / "folder", files)
    damage(folder)
    line = line_of(tmp_path, folder, "reward" if case.endswith("_reward") else "sft")
    assert all(needle in line for needle in [str(folder), *needles]), line
    return line


@pytest.mark.parametrize("name", by_default(FILES, [*FILES][::3]))
def test_damaged_weights(name, tmp_path):
    assert f"--hf-model {tmp_path}" in refused(tmp_path, "llama2", 1, *FILES[name])


def test_an_error_is_no_longer_than_a_screen(tmp_path):
    damage = headed({"n" * 10**6: ([1], 0, 4)}, 4)
    assert len(refused(tmp_path, "llama2", 1, damage, [])) < 3000


@pytest.mark.parametrize("name", by_default(INDICES, [*INDICES][::3]))
def test_damaged_indices(name, tmp_path):
    assert f"--hf-model {tmp_path}" in refused(tmp_path, "llama2", 2, *INDICES[name])


OF_FAMILIES = [(case, name) for case, damages in FAMILIES.items() for name in damages]


@pytest.mark.parametrize("case, name", by_default(OF_FAMILIES, [(case, [*FAMILIES[case]][0]) for case in FAMILIES]))
def test_damaged_weights_of_other_families(case, name, tmp_path):
    assert f"--hf-model {tmp_path}" in refused(tmp_path, case, 1, *FAMILIES[case][name])


@pytest.mark.parametrize("name", by_default(TOKENIZERS, [*TOKENIZERS][::3]))
def test_damaged_tokenizers(name, tmp_path):
    assert f"--hf-model {tmp_path}" in refused(tmp_path, "llama2", 1, *TOKENIZERS[name])
