"""Damaged config.json files in Hugging Face folders: exit status 2 and one line that says what is wrong."""

import pytest

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import (
    CONFIG,
    config,
    cut,
    in_order,
    line_of,
    loop,
    remove,
    rope,
    text,
    text_config,
    without,
)
from tests.helpers.folders.hf_layouts import SUPPORTED
from tests.helpers.tiers import by_default

# -- config.json -------------------------------------------------------------------------------------------------

LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
SETS = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}

FOLDER = "config.json of --hf-model"  # where a flag of Megatron comes from


def refused_type(field: str, given: str) -> list[str]:
    """What the line contains when transformers refuses the type of an entry."""
    return ["config.json: transformers cannot read it", f"'{field}'", given]


# name -> damage to a llama, what the line must contain
CONFIGS = {
    "missing": (remove(CONFIG), ["config.json is missing"]),
    "empty": (text(CONFIG, ""), ["config.json is not JSON"]),
    "half": (cut(CONFIG, 100), ["config.json is not JSON"]),
    "not UTF-8": (text(CONFIG, b'{"model_type": "\xff"}'), ["config.json is not JSON"]),
    "nested without end": (text(CONFIG, "[" * 200_000), ["config.json is not JSON"]),
    "a list": (text(CONFIG, "[]"), ["config.json holds no JSON object"]),
    "null": (text(CONFIG, "null"), ["config.json holds no JSON object"]),
    "unreadable": (loop(CONFIG), ["config.json cannot be read"]),
    "no family": (without("model_type"), ["model_type None: allowed are", "llama"]),
    "unknown family": (config(model_type="gpt2"), ["model_type 'gpt2': allowed are", "llama"]),
    "family of two lines": (config(model_type="ll\nama"), [r"model_type 'll\nama'"]),
    "family no name": (config(model_type=["llama"]), ["model_type ['llama']"]),
    "layers a text": (config(num_hidden_layers="x"), refused_type("num_hidden_layers", "got str")),
    "no layers": (config(num_hidden_layers=0), ["num_hidden_layers 0: allowed is a whole number above 0"]),
    "layers without end": (config(num_hidden_layers=10**9), ["num_hidden_layers 1000000000: allowed are at most"]),
    "half layers": (config(num_hidden_layers=2.5), refused_type("num_hidden_layers", "got float")),
    "layers true": (config(num_hidden_layers=True), refused_type("num_hidden_layers", "got bool")),
    "layers null": (config(num_hidden_layers=None), refused_type("num_hidden_layers", "got NoneType")),
    "hidden size negative": (config(hidden_size=-64), ["hidden_size -64: allowed is a whole number above 0"]),
    "vocabulary a text": (config(vocab_size="112"), refused_type("vocab_size", "'112'")),
    "head_dim a text": (config(head_dim="x"), refused_type("head_dim", "'x'")),
    "heads not in groups": (config(num_key_value_heads=3), ["--num-query-groups 3", "--num-attention-heads 4", FOLDER]),
    "epsilon a text": (config(rms_norm_eps="1e-5"), refused_type("rms_norm_eps", "'1e-5'")),
    "epsilon negative": (config(rms_norm_eps=-1e-5), ["rms_norm_eps -1e-05: allowed is a number of 0 or more"]),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), ["rms_norm_eps nan: allowed is a number of 0 or more"]),
    "activation": (config(hidden_act="gelu"), ["hidden_act 'gelu': allowed is 'silu'"]),
    "biases half": (config(attention_bias=True), ["attention_bias True: allowed is False"]),
    "biases a text": (config(attention_bias="yes"), refused_type("attention_bias", "'yes'")),
    "tying a text": (config(tie_word_embeddings="no"), refused_type("tie_word_embeddings", "'no'")),
    "positions": (config(max_position_embeddings=63), ["--max-position-embeddings 63", FOLDER, "64"]),
    "quantized": (config(quantization_config={"quant_method": "fp8"}), ["'fp8', but no tensor is quantized; remove"]),
    "without a head": (config(architectures=["LlamaModel"]), ["architectures ['LlamaModel']", "…ForCausalLM"]),
    "another head": (config(architectures=["LlamaForTokenClassification"]),
                     ["architectures ['LlamaForTokenClassification']: allowed"]),
    "architectures a text": (config(architectures="LlamaForCausalLM"), ["architectures 'LlamaForCausalLM'", "a list"]),
    "architectures numbers": (config(architectures=[1]), ["architectures [1]", "a list of names"]),
    "rope a list": (config(rope_parameters=[1]), refused_type("rope_parameters", "[1]")),
    "rope scaling a text": (in_order(without("rope_parameters"), config(rope_theta=1e4, rope_scaling="linear")),
                            refused_type("rope_parameters", "'linear'")),
    "rope unknown": (rope(rope_type="longrope", factor=4.0), ["Missing required keys", "'longrope'", "short_factor"]),
    "rope of others": (rope(rope_type="proportional", factor=4.0), ["'proportional'", "dynamic, llama3, longrope"]),
    "rope dynamic": (in_order(config(max_position_embeddings=63), rope(rope_type="dynamic", factor=4.0)),
                     ["a prompt and response of 63 tokens together at most for rope_type dynamic"]),
    "rope no name": (rope(rope_type=["linear"], factor=4.0), ["['linear']", "dynamic, llama3, longrope or yarn"]),
    "rope of both kinds": (config(rope_parameters=SETS), ["rope_parameters", "allowed is one set for all layers"]),
    "theta a text": (rope(rope_theta="1e4"), ["rope_theta", "'1e4'"]),
    "theta true": (rope(rope_theta=True), ["rope_theta", "True"]),
    "theta negative": (rope(rope_theta=-1e4), ["rope_theta", "-10000.0"]),
    "theta NaN": (rope(rope_theta=float("nan")), ["rope_theta", "nan"]),
    "theta infinite": (rope(rope_theta=float("inf")), ["rope_theta", "inf"]),
    "factor missing": (rope(rope_type="linear"), ["Missing required keys", "'linear'", "factor"]),
    "factor a text": (rope(rope_type="linear", factor="4"), ["a factor above 0 for rope_type linear"]),
    "factor 0": (rope(rope_type="linear", factor=0), ["a factor above 0 for rope_type linear"]),
    "factor NaN": (rope(rope_type="linear", factor=float("nan")), ["a factor above 0 for rope_type linear"]),
    "factor infinite": (rope(**LLAMA3 | {"factor": float("inf")}), ["a factor above 0 for rope_type llama3"]),
    "llama3 frequencies": (rope(**LLAMA3 | {"high_freq_factor": 0.5}), ["--rope-high-freq-factor 0.5", FOLDER]),
    "llama3 length": (rope(**LLAMA3 | {"original_max_position_embeddings": 0}),
                      ["a number above 0 for original_max_position_embeddings"]),
    "yarn beta a text": (rope(rope_type="yarn", factor=4, original_max_position_embeddings=64, beta_fast="32"),
                         ["validate_rope", "'str' and 'int'"]),
    "fraction": (rope(partial_rotary_factor=0.5), ["'partial_rotary_factor': 0.5", "of 1 in this family"]),
    "fraction outside": (config(partial_rotary_factor=0.5), ["'partial_rotary_factor': 0.5", "of 1 in this"]),
}  # fmt: skip

# case -> name -> damage, what the line must contain
FAMILIES = {
    "qwen2_moe": {
        "no experts": (config(num_experts=0), ["num_experts 0: allowed is a whole number above 0"]),
        "experts a text": (config(num_experts="4"), refused_type("num_experts", "'4'")),
        "no choice": (config(num_experts_per_tok=0), ["num_experts_per_tok 0: allowed is a whole number above 0"]),
        "more than there are": (config(num_experts_per_tok=99), ["--moe-router-topk 99", FOLDER]),
        "size": (config(moe_intermediate_size=None), refused_type("moe_intermediate_size", "NoneType")),
        "normalization a text": (config(norm_topk_prob="yes"), refused_type("norm_topk_prob", "'yes'")),
        "period": (config(decoder_sparse_step=0), ["decoder_sparse_step 0: allowed is a whole number above 0"]),
        "dense layers a number": (config(mlp_only_layers=1), refused_type("mlp_only_layers", "value 1")),
        "dense layers named": (config(mlp_only_layers=["0"]), refused_type("mlp_only_layers", "['0']")),
        "no layer with experts": (config(mlp_only_layers=[0, 1, 2, 3]), ["mlp.gate_proj.weight is missing"]),
        "window a text": (config(use_sliding_window=True, sliding_window="8"), refused_type("sliding_window", "'8'")),
        "window switch": (config(use_sliding_window="no"), refused_type("use_sliding_window", "'no'")),
        "windows of layers that are off": (
            config(layer_types=["sliding_attention"] * 3), ["allowed is no sliding_attention without a sliding_window"]
        ),
        "kinds of layers a number": (config(layer_types=4), refused_type("layer_types", "value 4")),
        "biases a text": (config(qkv_bias="yes"), refused_type("qkv_bias", "'yes'")),
    },
    "glm4_moe": {
        "not normalized": (config(norm_topk_prob=False), ["norm_topk_prob False: allowed is True"]),
        "one choice": (config(num_experts_per_tok=1), ["num_experts_per_tok 1: allowed is 2 or more"]),
        "scale a text": (config(routed_scaling_factor="x"), refused_type("routed_scaling_factor", "'x'")),
        "no shared expert": (config(n_shared_experts=0), ["n_shared_experts 0: allowed is a whole number above 0"]),
        "dense layers a fraction": (config(first_k_dense_replace=1.5), refused_type("first_k_dense_replace", "1.5")),
        "dense layers alone": (config(first_k_dense_replace=4), ["mlp.gate_proj.weight is missing"]),
        "groups of unequal size": (config(n_group=3, topk_group=1, num_experts_per_tok=2),
                                   ["--moe-router-num-groups 3", FOLDER]),
        "three experts of a group": (config(n_group=2, topk_group=1, num_experts_per_tok=3),
                                     ["num_experts_per_tok 3: allowed is 2 for each"]),
        "more groups than there are": (config(n_group=2, topk_group=3), ["--moe-router-group-topk 3", FOLDER]),
    },
    "deepseek_v3": {
        "biases": (config(attention_bias=True), ["attention_bias True: allowed is False"]),
        "fewer keys than heads": (config(num_key_value_heads=2), ["num_key_value_heads 2: allowed is 4"]),
        "halves rotated": (config(rope_interleave=False), ["rope_interleave False: allowed is True"]),
        "every second layer": (config(moe_layer_freq=2), ["moe_layer_freq 2: allowed is 1"]),
        "another score": (config(scoring_func="softmax"), ["scoring_func 'softmax': allowed is 'sigmoid'"]),
        "another choice": (config(topk_method="greedy"), ["topk_method 'greedy': allowed is 'noaux_tc'"]),
        "three experts of a group": (config(num_experts_per_tok=6), ["num_experts_per_tok 6: allowed is 2 for each"]),
        "no latent": (config(kv_lora_rank=None), refused_type("kv_lora_rank", "NoneType")),
        "odd rotation": (config(qk_rope_head_dim=15), ["--qk-pos-emb-head-dim 15", "an even number", FOLDER]),
        "another latent": (config(kv_lora_rank=18),
                           ["kv_a_proj_with_mqa.weight has shape [32, 64]; config.json describes [34, 64]"]),
        "linear rotation": (rope(rope_type="linear", factor=2), ["rope_type default or yarn in this family"]),
        "dense layers alone": (config(first_k_dense_replace=3), ["mlp.gate_proj.weight is missing"]),
    },
    "deepseek_v3_yarn": {
        "one factor": (rope(mscale=None), ["mscale_all_dim beside mscale, without attention_factor"]),
        "a factor of its own": (rope(attention_factor=1.2), ["mscale_all_dim beside mscale, without attention_factor"]),
    },
    "deepseek_v2": {
        "normalized": (config(norm_topk_prob=True), ["norm_topk_prob True: allowed is False"]),
        "another choice": (config(topk_method="noaux_tc"), ["topk_method 'noaux_tc': allowed is 'greedy' or 'group"]),
        "no groups": (config(n_group=None), ["n_group None: allowed is a whole number above 0"]),
        "groups of unequal size": (config(n_group=3), ["--moe-router-num-groups 3", FOLDER]),
        "more groups than there are": (config(topk_group=5), ["--moe-router-group-topk 5", FOLDER]),
        "biases of the MLP": (config(mlp_bias=True), ["mlp_bias True: allowed is False"]),
    },
    "phi4": {
        "other lengths": (in_order(config(original_max_position_embeddings=63), rope(**LONGROPE)),
                          ["a prompt and response of 63 tokens together at most for rope_type longrope"]),
        "two divisors": (rope(**LONGROPE | {"short_factor": [1.0, 2.0]}), ["short_factor field must have length"]),
        "fraction a text": (rope(partial_rotary_factor="half"), ["validate_rope", "halfhalf"]),
        "fraction 0": (rope(partial_rotary_factor=0), ["'partial_rotary_factor': 0", "above 0, at most 1"]),
        "fraction above 1": (rope(partial_rotary_factor=1.5), ["1.5", "above 0, at most 1"]),
        "fraction true": (rope(partial_rotary_factor=True), ["True", "above 0, at most 1"]),
    },
    "ministral3": {
        "scaled queries": (rope(original_max_position_embeddings=63),
                           ["a prompt and response of 63 tokens together at most", "llama_4_scaling_beta"]),
    },
    "glm_moe_dsa": {
        "more tokens than are chosen": (config(index_topk=63), ["a prompt and response of 63 tokens together at most"]),
    },
    "mistral4": {
        "another share of the channels": (rope(partial_rotary_factor=0.5), ["the share of qk_rope_head_dim"]),
        "groups": (config(n_group=2), ["n_group 2: allowed is 1"]),
    },
    "mistral3": {
        "another language model": (text_config(model_type="qwen2"),
                                   ["model_type 'qwen2': allowed is 'mistral', 'ministral3', 'mistral4'"]),
    },
    "mistral": {
        "window a text": (config(sliding_window="8"), refused_type("sliding_window", "'8'")),
        "window 0": (config(sliding_window=0), ["sliding_window 0: allowed is a whole number above 0"]),
    },
    "gemma3": {
        "rotation of windows scaled": (rope(sliding_attention={"rope_type": "linear", "factor": 2, "rope_theta": 1e4}),
                                       ["a rope_theta above 0, and rope_type default, of sliding_attention"]),
        "both directions": (config(use_bidirectional_attention=True), ["use_bidirectional_attention True: allowed is"]),
    },
    "qwen3": {"biases": (config(attention_bias=True), ["attention_bias True: allowed is False"])},
    "nemotron_h": {
        "convolution without bias": (config(use_conv_bias=False), ["use_conv_bias False: allowed is True"]),
        "activation": (config(mlp_hidden_act="silu"), ["mlp_hidden_act 'silu': allowed is 'relu2'"]),
        "no states": (config(layers_block_type=["mlp"] * 5), ["layers_block_type", "linear_attention of one layer"]),
    },
    "gpt_oss": {
        "MXFP4": (config(quantization_config={"quant_method": "mxfp4"}), ["'mxfp4', but no tensor is quantized"]),
        "no biases": (config(attention_bias=False), ["attention_bias False: allowed is True"]),
        "another gate": (config(swiglu_alpha=1.0), ["swiglu_alpha 1.0: allowed is 1.702"]),
        "clamp a text": (config(swiglu_limit="7"), refused_type("swiglu_limit", "'7'")),
    },
    "llama_reward": {
        "two labels": (config(id2label={"0": "bad", "1": "good"}), ["num_labels 2: allowed is one"]),
        "two labels by number": (config(num_labels=2), ["num_labels 2: allowed is one"]),
        "labels by default": (without("id2label", "num_labels"), ["num_labels 2: allowed is one"]),
        "labels a number": (config(id2label=1), ["config.json: transformers cannot read it", "'int' object"]),
    },
}  # fmt: skip

# Cases that transformers computes and megarl does not yet -> what the line must contain
UNSUPPORTED = {
    "llama_bias": "attention_bias True",
}


def refused(tmp_path, case, damage, needles):
    folder = hf_folders.write_folder(case, tmp_path / "folder")
    damage(folder)
    line = line_of(tmp_path, folder, "reward" if case.endswith("_reward") else "sft")
    assert all(needle in line for needle in [f"--hf-model {folder}", *needles]), line


@pytest.mark.parametrize("name", by_default(CONFIGS, [*CONFIGS][::3]))
def test_damaged_configurations(name, tmp_path):
    refused(tmp_path, "llama2", *CONFIGS[name])


OF_FAMILIES = [(case, name) for case, damages in FAMILIES.items() for name in damages]


@pytest.mark.parametrize("case, name", by_default(OF_FAMILIES, [(case, [*FAMILIES[case]][0]) for case in FAMILIES]))
def test_damaged_configurations_of_other_families(case, name, tmp_path):
    refused(tmp_path, case, *FAMILIES[case][name])


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_models_that_megarl_does_not_compute(case, tmp_path):
    refused(tmp_path, case, lambda folder: None, ["config.json: ", UNSUPPORTED[case]])


def test_every_case_is_computed_or_refused():
    assert sorted([*SUPPORTED, *UNSUPPORTED]) == hf_folders.CASES
