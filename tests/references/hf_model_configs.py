"""Configurations of small transformers models, one or more of each family, for tests/references/hf_models.py.

Not imported by tests: needs transformers.
"""

from typing import Any, NamedTuple

import transformers as hf

BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
           "mlp_only_layers": []}  # fmt: skip
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
# From a short original context, so that few positions already show every part of the rule.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
# Longer than the sequences here, whose queries would be scaled from there on.
MINISTRAL_3 = YARN | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                      "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
GLM_4_MOE = {
    "num_hidden_layers": 4, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
GLM_4V_MOE = GLM_4_MOE | {"rope_parameters": GLM_4_MOE["rope_parameters"] | {"mrope_section": [2, 3, 3]}}
del GLM_4V_MOE["use_qk_norm"]
LATENTS = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
           "v_head_dim": 24}  # fmt: skip
DEEPSEEK = {**LATENTS, "n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
MISTRAL_4 = DEEPSEEK | {"q_lora_rank": 24, "num_experts_per_tok": 3, "n_shared_experts": 1}
DEEPSEEK_V3 = DEEPSEEK | {
    "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "q_lora_rank": 24, "num_mtp_layers": 0,
}  # fmt: skip
# All tokens are chosen: the sequences of the tests are shorter.
DEEPSEEK_V32 = {name: value for name, value in DEEPSEEK_V3.items() if name != "num_mtp_layers"} | {
    "index_topk": 160, "index_head_dim": 32, "index_n_heads": 2,
}  # fmt: skip
SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
           "n_group": 1, "topk_group": 1, "norm_topk_prob": True}  # fmt: skip


# Layers with a recurrent state; sequences cross a border of the 64 tokens that transformers computes at a time.
DELTA_NET = {"num_hidden_layers": 4, "head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
             "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip


# Kimi delta attention in three of four layers.
KIMI_DELTA = LATENTS | {
    "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
KIMI_LINEAR = {"linear_num_heads": 4, "linear_head_dim": 32, "n_group": 1, "topk_group": 1,
               "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}  # fmt: skip
LING_3 = {
    "head_dim": 32,
    "layer_group_size": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "num_mtp_layers": 0,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "kda_lower_bound": -1.5,
}  # sums of logarithms in chunks keep their digits


# Layers of one half each, with a name and further fields.
EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
NEMOTRON_H: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("M-M*-", {}),
    "nemotron_h_moe": ("ME*MEM", EXPERTS | {"num_experts_per_tok": 2, "routed_scaling_factor": 2.5}),
    "nemotron_h_latent": ("ME*E", EXPERTS | {"num_experts_per_tok": 3, "moe_latent_size": 40}),
}


class Case(NamedTuple):
    """A model class, its configuration, the type in which its weights are stored, its end tokens, and the lengths of
    the sequences."""

    model: type
    config: Any
    dtype: str = "float32"
    end: int | list[int] = 2
    lengths: tuple[int, ...] = (40, 23)


def theta(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def case(family: str, rope: dict[str, Any], dtype: str = "float32", end: int | list[int] = 2, **fields) -> Case:
    """A causal model of `{family}Config` and `{family}ForCausalLM`."""
    config = getattr(hf, f"{family}Config")(**BASE | {"rope_parameters": rope} | fields)
    return Case(getattr(hf, f"{family.removesuffix('Text')}ForCausalLM"), config, dtype, end)


def scalar(family: str, rope: dict[str, Any], **fields) -> Case:
    """A model with a head of one row."""
    config = getattr(hf, f"{family}Config")(**BASE | {"rope_parameters": rope, "num_labels": 1} | fields)
    return Case(getattr(hf, f"{family}ForSequenceClassification"), config)


def multimodal(family: str, end: int | list[int], vision: dict[str, Any], text: dict[str, Any], **fields) -> Case:
    """A model with a vision tower, `{family}ForConditionalGeneration`."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    shared = {key: value for key, value in BASE.items() if key not in ids}
    config = getattr(hf, f"{family}Config")(text_config=shared | text, vision_config=vision, **fields)
    return Case(getattr(hf, f"{family}ForConditionalGeneration"), config, end=end)


def nemotron_h(pattern: str, fields: dict[str, Any]) -> Case:
    """Nemotron-H with these kinds of layers."""
    shared = {key: value for key, value in BASE.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention", "E": "moe"}
    config = hf.NemotronHConfig(**shared | {
        "layers_block_type": [kinds[letter] for letter in pattern], "head_dim": 16, "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 64,
    } | fields)  # fmt: skip
    return Case(hf.NemotronHForCausalLM, config)


def basic() -> dict[str, Case]:
    """Families whose layers are Megatron's."""
    return {
        "llama2": case("Llama", theta(1e4), num_key_value_heads=4, rms_norm_eps=1e-5),
        "llama3": case("Llama", LLAMA_3 | {"factor": 8.0}, end=[2, 0], vocab_size=112, num_hidden_layers=4,
                       max_position_embeddings=131072, rms_norm_eps=1e-5),
        "llama32": case("Llama", LLAMA_3 | {"factor": 32.0}, end=[2, 0], head_dim=32, tie_word_embeddings=True,
                        max_position_embeddings=131072, rms_norm_eps=1e-5),
        "smollm2": case("Llama", theta(1e5), hidden_size=96, num_attention_heads=3, num_key_value_heads=1,
                        tie_word_embeddings=True, rms_norm_eps=1e-5),
        "qwen2": case("Qwen2", theta(1e6), vocab_size=131, end=[2, 0]),
        "qwen25_tied": case("Qwen2", theta(1e6), vocab_size=107, tie_word_embeddings=True, num_hidden_layers=4),
        "qwen3": case("Qwen3", theta(1e6), head_dim=32, tie_word_embeddings=True, end=[2, 0]),
        "mistral": case("Mistral", theta(1e6), vocab_size=101, sliding_window=None, rms_norm_eps=1e-5),
        "phi4": case("Phi3", theta(250000.0), intermediate_size=160, rms_norm_eps=1e-5),
        "phi4_mini": case("Phi3", theta(10000.0) | {
            "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [4.0] * 6,
            "partial_rotary_factor": 0.75}, original_max_position_embeddings=128, max_position_embeddings=2048,
            tie_word_embeddings=True),
        "qwen2_moe": case("Qwen2Moe", theta(1e6), **EXPERTS, norm_topk_prob=False,
                          shared_expert_intermediate_size=96),
        "qwen3_moe": case("Qwen3Moe", theta(1e6), **EXPERTS, norm_topk_prob=True, head_dim=32, vocab_size=160),
        "mixtral": case("Mixtral", theta(1e6), num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
                        intermediate_size=96, rms_norm_eps=1e-5),
        "glm4_moe": case("Glm4Moe", {}, end=[2, 0, 1], **GLM_4_MOE),
        "glm4_moe_bf16": case("Glm4Moe", {}, dtype="bfloat16", end=[2, 0, 1], **GLM_4_MOE),
        "seed_oss": case("SeedOss", theta(1e7), head_dim=32),
        "cwm": case("Cwm", LLAMA_3 | {"factor": 16.0}, num_hidden_layers=4, head_dim=32, sliding_window=8,
                    max_position_embeddings=131072, end=[2, 0]),
        "arcee": case("Arcee", YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}, head_dim=32),
        "ministral": case("Ministral", theta(1e8), head_dim=32, sliding_window=8, layer_types=[
            "full_attention", "sliding_attention", "sliding_attention"]),
        "ministral3": case("Ministral3", dict(MINISTRAL_3), head_dim=32, tie_word_embeddings=True,
                           max_position_embeddings=262144),
        "iquestcoder": Case(hf.LlamaForCausalLM, hf.IQuestCoderConfig(**BASE | {"rope_parameters": theta(5e5)})),
        "exaone4": case("Exaone4", LLAMA_3 | {"factor": 16.0}, num_hidden_layers=4, sliding_window=8,
                        layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=131072),
        "exaone4_whole": case("Exaone4", theta(1e6), sliding_window=None, layer_types=["full_attention"] * 3,
                              tie_word_embeddings=True),
        "solar_open": case("SolarOpen", theta(1e6), **SIGMOID, head_dim=32, routed_scaling_factor=1.5),
        "llama_reward": scalar("Llama", theta(1e4), rms_norm_eps=1e-5),
        "qwen3_reward": scalar("Qwen3", theta(1e6), head_dim=32),
    }  # fmt: skip


def further() -> dict[str, Case]:
    """Families that need more of the layers."""
    sliding, full = "sliding_attention", "full_attention"
    two_bases = {sliding: theta(1e4), full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    yarn_on_full = {sliding: theta(1e4), full: YARN | {"beta_fast": 32.0, "beta_slow": 1.0}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
    tower = vision | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    mscale = {"mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 32.0, "beta_slow": 1.0}
    return {
        "llama_bias": case("Llama", theta(1e4), attention_bias=True, mlp_bias=False),
        "llama_linear_rope": case("Llama", theta(1e4) | {"rope_type": "linear", "factor": 4.0}),
        "llama_yarn": case("Llama", YARN | {"beta_fast": 8.0, "beta_slow": 2.0}),
        "qwen3_yarn": case("Qwen3", YARN, head_dim=32, tie_word_embeddings=True),
        "mistral_window": case("Mistral", theta(1e6), sliding_window=8, head_dim=32),
        "qwen2_window": case("Qwen2", theta(1e6), use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen2_moe_window": case("Qwen2Moe", theta(1e6), **EXPERTS, norm_topk_prob=False, num_hidden_layers=4,
                                 shared_expert_intermediate_size=96, use_sliding_window=True, sliding_window=8,
                                 max_window_layers=2),
        "qwen3_moe_window": case("Qwen3Moe", theta(1e6), **EXPERTS, norm_topk_prob=True, head_dim=32,
                                 use_sliding_window=True, sliding_window=8),
        "gemma2": case("Gemma2", theta(1e4), num_hidden_layers=4, head_dim=32, query_pre_attn_scalar=24,
                       sliding_window=8, tie_word_embeddings=True, attn_logit_softcapping=2.0,
                       final_logit_softcapping=5.0),
        "gemma3": case("Gemma3Text", two_bases, num_hidden_layers=4, head_dim=32, query_pre_attn_scalar=24,
                       sliding_window=8, tie_word_embeddings=True, layer_types=[sliding, sliding, full, sliding],
                       end=[2, 0]),
        "gemma3_vision": multimodal(
            "Gemma3", [2, 0], tower, {
                "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8,
                "layer_types": [sliding, sliding, full, sliding], "rope_parameters": two_bases},
            mm_tokens_per_image=4, image_token_index=100, boi_token_index=101, eoi_token_index=102),
        "qwen3_vl": multimodal(
            "Qwen3VL", [2, 0], vision | {
                "depth": 2, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16},
            {"head_dim": 32, "rope_parameters": theta(1e6) | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
            image_token_id=100, video_token_id=101, vision_start_token_id=102, vision_end_token_id=103),
        "qwen3_vl_moe": multimodal(
            "Qwen3VLMoe", [2, 0], vision | {
                "depth": 2, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16},
            EXPERTS | {"head_dim": 32, "mlp_only_layers": [1],
                       "rope_parameters": theta(1e6) | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
            image_token_id=100, video_token_id=101, vision_start_token_id=102, vision_end_token_id=103),
        "glm4v_moe": multimodal(
            "Glm4vMoe", [2, 0], vision | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "image_size": 28},
            GLM_4V_MOE, image_token_id=100, video_token_id=101, image_start_token_id=102, image_end_token_id=103,
            video_start_token_id=104, video_end_token_id=105),
        "mistral3": multimodal(
            "Mistral3", 2, tower | {"model_type": "pixtral"},
            {"model_type": "mistral", "head_dim": 32, "sliding_window": None, "rope_parameters": theta(1e6)},
            image_token_index=10, tie_word_embeddings=False),
        "mistral3_ministral3": multimodal(
            "Mistral3", 2, tower | {"model_type": "pixtral"},
            {"model_type": "ministral3", "head_dim": 32, "sliding_window": None, "rope_parameters": dict(MINISTRAL_3)},
            image_token_index=10, tie_word_embeddings=False),
        "mistral3_mistral4": multimodal(
            "Mistral3", 2, tower | {"model_type": "pixtral"},
            {"model_type": "mistral4", **MISTRAL_4, "rope_parameters": MINISTRAL_3 | {"partial_rotary_factor": 1 / 3}},
            image_token_index=10, tie_word_embeddings=False),
        "mistral4": case("Mistral4", dict(MINISTRAL_3), **MISTRAL_4),
        # As published without a token for padding, whose row transformers would set to 0 as it reads a folder.
        "afmoe": case("Afmoe", theta(1e4), num_hidden_layers=4, head_dim=32, sliding_window=8, num_experts=8,
                      num_experts_per_tok=3, moe_intermediate_size=32, num_dense_layers=1, num_shared_experts=2,
                      route_scale=2.5, mup_enabled=True, global_attn_every_n_layers=2, pad_token_id=None),
        "youtu": case("Youtu", theta(1e6), **LATENTS, q_lora_rank=24, tie_word_embeddings=True, pad_token_id=None),
        "mellum": case("Mellum", yarn_on_full, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                       head_dim=32, num_hidden_layers=4, sliding_window=8, norm_topk_prob=True,
                       layer_types=[sliding, sliding, full, sliding],
                       mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
        "qwen2_5_vl": multimodal(
            "Qwen2_5_VL", [2, 0], vision | {
                "depth": 2, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 28},
            {"rope_parameters": theta(1e6) | {"mrope_section": [2, 3, 3]}},
            image_token_id=100, video_token_id=101, vision_start_token_id=102, vision_end_token_id=103),
        "qwen2_vl": multimodal(
            "Qwen2VL", [2, 0], {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
            {"rope_parameters": theta(1e6) | {"mrope_section": [2, 3, 3]}},
            image_token_id=100, video_token_id=101, vision_start_token_id=102, vision_end_token_id=103),
        "glm": case("Glm", theta(1e4) | {"partial_rotary_factor": 0.5}, head_dim=32),
        "glm4": case("Glm4", theta(1e4) | {"partial_rotary_factor": 0.5}, head_dim=32, end=[2, 0]),
        "ernie4_5": case("Ernie4_5", theta(5e5), head_dim=32, tie_word_embeddings=True),
        "smollm3": case("SmolLM3", theta(2e6), num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
        "olmoe": case("Olmoe", theta(1e4), num_experts=8, num_experts_per_tok=2, intermediate_size=48,
                      norm_topk_prob=False),
        "minimax_m2": case("MiniMaxM2", theta(5e6) | {"partial_rotary_factor": 0.5}, head_dim=32, num_local_experts=8,
                           num_experts_per_tok=3, intermediate_size=48),
        "dots1": case("Dots1", theta(1e7), **SIGMOID, first_k_dense_replace=1, routed_scaling_factor=2.5, head_dim=32,
                      sliding_window=None),
        "glm4_moe_lite": case("Glm4MoeLite", theta(1e6), **DEEPSEEK | SIGMOID | {
            "q_lora_rank": 24, "routed_scaling_factor": 1.8, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        "deepseek_v32": case("DeepseekV32", YARN | mscale, **DEEPSEEK_V32),
        "glm_moe_dsa": case("GlmMoeDsa", theta(1e6), **DEEPSEEK_V32 | {
            "n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
            "indexer_types": ["full", "full", "shared", "full"]}),
        "exaone_moe": case("ExaoneMoe", theta(1e6), num_hidden_layers=4, head_dim=32, sliding_window=8,
                           sliding_window_pattern=4, num_experts=8, num_experts_per_tok=4,
                           moe_intermediate_size=32),
        "internlm3": Case(hf.LlamaForCausalLM, hf.InternLM3Config(**BASE | {
            "rope_parameters": theta(5e7) | {"rope_type": "dynamic", "factor": 6.0}, "head_dim": 32})),
        "sarvam_mla": Case(hf.DeepseekV3ForCausalLM, hf.SarvamMLAConfig(**BASE | {"rope_parameters": YARN | mscale}
            | DEEPSEEK_V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1})),
        "sarvam_moe": Case(hf.Glm4MoeForCausalLM, hf.SarvamMoEConfig(**BASE | {"rope_parameters": theta(8e6)} | SIGMOID
            | {"first_k_dense_replace": 1, "head_dim": 32, "routed_scaling_factor": 2.5, "use_qk_norm": True})),
        "hy_v3": case("HYV3", theta(11158840.0), num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
                      head_dim=32, router_scaling_factor=2.826, pad_token_id=None),
        "olmo2": case("Olmo2", theta(5e5)),
        "olmo3": case("Olmo3", yarn_on_full, num_hidden_layers=4, sliding_window=8),
        "gpt_oss": case("GptOss", YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, num_hidden_layers=4,
                        head_dim=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
                        intermediate_size=48, rms_norm_eps=1e-5, swiglu_limit=0.5),
        "deepseek_v2": case("DeepseekV2", theta(1e4), **DEEPSEEK, num_experts_per_tok=3, n_shared_experts=2,
                            q_lora_rank=24, n_group=4, topk_group=2, topk_method="group_limited_greedy",
                            routed_scaling_factor=2.0, norm_topk_prob=False),
        "deepseek_v2_lite": case("DeepseekV2", theta(1e4), **DEEPSEEK, num_experts_per_tok=3, n_shared_experts=2,
                                 q_lora_rank=None, topk_method="greedy", norm_topk_prob=False),
        "deepseek_v3": case("DeepseekV3", theta(1e4), **DEEPSEEK_V3),
        "deepseek_v3_yarn": case("DeepseekV3", YARN | mscale, **DEEPSEEK_V3),
        "moonlight": case("DeepseekV3", theta(5e4), **DEEPSEEK_V3 | {
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "rms_norm_eps": 1e-2}),
    }  # fmt: skip


def recurrent() -> dict[str, Case]:
    """Families with recurrent states in most layers."""
    rope, experts = theta(1e4) | {"partial_rotary_factor": 0.25}, EXPERTS | {"shared_expert_intermediate_size": 32}
    three_axes = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14, "depth": 1, "num_heads": 2,
             "out_hidden_size": 64, "num_position_embeddings": 16}  # fmt: skip
    ids = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    text = DELTA_NET | {"rope_parameters": three_axes}
    published = {
        "qwen35_vision": multimodal("Qwen3_5", [2, 0], tower, text, **ids),
        "qwen35_moe_vision": multimodal("Qwen3_5Moe", [2, 0], tower, text | experts, **ids),
    }
    published |= {name: nemotron_h(*each) for name, each in NEMOTRON_H.items()}
    published = {name: each._replace(lengths=(97, 23, 2)) for name, each in published.items()}
    return published | {
        name: case(family, rope, **DELTA_NET, **fields)._replace(lengths=(97, 23, 2))
        for name, family, fields in (
            ("qwen3_next", "Qwen3Next", experts),
            ("qwen35_dense", "Qwen3_5Text", {"tie_word_embeddings": True}),
            ("qwen35_moe", "Qwen3_5MoeText", experts),
        )
    } | {
        "kimi_linear": Case(hf.KimiLinearForCausalLM, hf.KimiLinearConfig(**BASE | KIMI_DELTA | KIMI_LINEAR),
                            lengths=(97, 23, 2)),
        "ling_3": case("BailingHybrid", theta(6e6), **KIMI_DELTA | LING_3)._replace(lengths=(97, 23, 2)),
    }  # fmt: skip


def old_style() -> dict[str, tuple[str, dict[str, Any]]]:
    """Cases with the configuration that transformers 4 wrote: the case of the same weights, and further fields."""
    return {
        "llama3_old_style": ("llama3", {}),
        "qwen25_tied_old_style": ("qwen25_tied", {"use_sliding_window": False, "sliding_window": 8,
                                                  "max_window_layers": 2}),
        "qwen2_window_old_style": ("qwen2_window", {}),
        "qwen2_moe_window_old_style": ("qwen2_moe_window", {}),
        "qwen3_yarn_old_style": ("qwen3_yarn", {}),
        "kimi_k2": ("deepseek_v3_yarn", {"model_type": "kimi_k2", "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                                         "moe_layer_freq": 1, "num_nextn_predict_layers": 0}),
    }  # fmt: skip
