"""Small models of every causal language model type of transformers, from its own classes, with random weights.

A configuration has the type's defaults with small sizes. It switches on what published folders of the type have:
windows, layers of several kinds, softcaps, experts.
"""

import copy
import os
import re
from pathlib import Path

import torch

from tests.helpers.texts import small_tokenizers

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "model_types.md"  # which of them run
VOCAB, LAYERS = 160, 6
# Entries by value: every name that some type has for such a size.
SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim mamba_d_ssm lru_width",
    96: "intermediate_size ffn_hidden_size ffn_dim n_inner d_ff dim_ff intermediate_size_mlp encoder_ffn_dim"
        " decoder_ffn_dim",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts moe_num_experts"
       " linear_num_value_heads mamba_n_heads mamba_num_heads swa_num_attention_heads laurel_rank"
       " encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk experts_per_token"
       " num_kv_shared_layers num_global_key_value_heads zero_expert_num index_n_heads linear_num_key_heads hc_mult"
       " swa_num_key_value_heads o_groups mamba_expand eos_token_id",
    16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim mamba_d_head mamba_head_dim dim_head d_kv"
        " mamba_chunk_size kv_channels linear_key_head_dim linear_value_head_dim o_lora_rank swa_head_dim"
        " swa_v_head_dim",
    128: "max_position_embeddings n_positions",
    32: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size"
        " shared_expert_size global_head_dim",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group first_k_dense_replace"
       " mamba_n_groups bos_token_id",
    8: "sliding_window attention_chunk_size qk_rope_head_dim hidden_size_per_layer_input index_topk mamba_d_state"
       " ssm_state_size rotary_dim block_size",
    24: "q_lora_rank qk_head_dim",
    0: "pad_token_id num_hash_layers num_nextn_predict_layers",
    20.0: "attn_logit_softcapping",
    30.0: "final_logit_softcapping",
}  # fmt: skip
SMALL = {name: value for value, names in SIZES.items() for name in names.split()}
SMALL |= dict(use_sliding_window=True, max_window_layers=3, use_qk_norm=True, qk_layernorm=True)
NONE_BY_DEFAULT = "num_key_value_heads", "head_dim", "sliding_window"
TOWER = dict(
    adapter_input_size=64, num_hidden_layers=2, depth=2, num_key_value_heads=4, out_hidden_size=64, intermediate_size=64
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Types whose entries depend on each other in another way.
OWN = {
    "bamba": dict(mamba_n_heads=8, mamba_d_head=16, attn_layer_indices=[1, 3]),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 3,
        rope_parameters={"sliding_attention": ROPE, "full_attention": ROPE},
    ),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": dict(
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
        topk_group=1, norm_topk_prob=True, layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "codegen": dict(rotary_dim=8),
    "deepseek_v2": dict(head_dim=8, moe_layer_freq=1, num_experts_per_tok=2),
    "dots3_note_vision_encoder": dict(num_hidden_layers=42, adapter_in_dim=64, adapter_out_dim=64),
    "ernie4_5_moe": dict(moe_layer_start_index=1, moe_layer_end_index=5),
    "falcon_h1": dict(mamba_n_groups=2, mamba_rms_norm=True),
    "gemma2": dict(query_pre_attn_scalar=16),
    "gpt_neo": dict(attention_types=[[["global", "local"], 3]], window_size=8),
    "granitemoehybrid": dict(
        mamba_n_heads=8, mamba_d_head=16, layer_types=["mamba", "attention"] * 3, position_embedding_type="rope"
    ),
    "gptj": dict(rotary_dim=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 3),
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"] * 3),
    "mamba2": dict(num_heads=8, head_dim=16, chunk_size=16),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4
    ),
    "qwen2_moe": dict(use_sliding_window=False),  # as published: of windows the module tells its masks alone
    "reformer": dict(axial_pos_embds_dim=[32, 32], axial_pos_shape=[8, 16]),
    "llama4_text": dict(interleave_moe_layer_step=2, floor_scale=8, attention_chunk_size=128),
    "longcat_flash": dict(num_layers=3, head_dim=8),
    "mellum": dict(layer_types=["sliding_attention", "full_attention"] * 3),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"] * 3, index_block_size=4, index_topk_blocks=2,
        index_local_blocks=1,
    ),
    "nemotron_h": dict(num_hidden_layers=4, hybrid_override_pattern="M*-E", n_groups=2),
    "phimoe": dict(sliding_window=131072),  # of published folders; the module's attention does not read it
    "olmo": dict(clip_qkv=8.0),
    "stablelm": dict(use_parallel_residual=True),
    "vaultgemma": dict(query_pre_attn_scalar=16),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"] * 3, layer_types=["mamba", "hybrid"] * 3),
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip
GEMMA = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 3,
    final_logit_softcapping=30.0, max_position_embeddings=128,
)  # fmt: skip
PER_LAYER = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=2)
GLOBAL = dict(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True)
# Types whose defaults cannot be read without their sizes.
WHOLE = {
    "gemma4_text": GEMMA | PER_LAYER | GLOBAL | dict(
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32
    ),
    "gemma4_unified_text": GEMMA | GLOBAL,
    "gemma4_assistant": dict(
        text_config=GEMMA | GLOBAL | dict(
            model_type="gemma4_text", hidden_size_per_layer_input=0, vocab_size_per_layer_input=0
        )
    ),
    "gemma3n_text": GEMMA | PER_LAYER | dict(laurel_rank=4, activation_sparsity_pattern=[0.95] * 2 + [0.0] * 4),
}  # fmt: skip
# Types whose first position is the one after that of padding, as in published folders.
AFTER_PADDING = "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl".split()
OWN |= {kind: dict(pad_token_id=1, bos_token_id=0, max_position_embeddings=130) for kind in AFTER_PADDING}
# Norms of small heads, which hardly write anything, would make rounding of transformers' own delta rules large.
DELTA_RULES = "lara_mini", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
OWN |= {kind: OWN.get(kind, {}) | dict(rms_norm_eps=1e-2) for kind in DELTA_RULES}
# Entries that some types refuse together; the first that goes without is taken.
LEFT_OUT = ((), ("qk_head_dim", "head_dim"), ("q_lora_rank",), ("head_dim",), ("num_key_value_heads",),
            ("num_hidden_layers", "num_layers"), ("max_position_embeddings", "n_positions"))  # fmt: skip


def types() -> list[str]:
    """Every type of a causal language model of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(kind: str, **entries):
    """A small configuration of a type, as a decoder, with these entries in place of its own. Raises what the type's
    class raises if no set of sizes fits."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    if kind in WHOLE:
        return made(**WHOLE[kind] | entries)
    default = made()
    sizes = {name: value for name, value in SMALL.items() if _has(default, name)}
    if {"qk_rope_head_dim", "kv_lora_rank"} <= sizes.keys():
        sizes |= {"head_dim": 8, "num_key_value_heads": 4}
    for name in getattr(made, "sub_configs", ()):
        if (part := getattr(default, name, None)) is not None:
            sizes[name] = _small_part(part)
    sizes |= OWN.get(kind, {}) | entries
    for names in LEFT_OUT:
        try:
            config = made(**{name: value for name, value in sizes.items() if name not in names})
        except Exception as error:  # whatever the class raises
            problem = error
        else:
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            return config
    raise problem


def _small_part(default) -> dict:
    """Entries of a small part of a composite configuration: its language model, or a tower."""
    if default.model_type in types():
        return small_config(default.model_type).to_dict()
    sizes = {name: value for name, value in (SMALL | TOWER).items() if _has(default, name)}
    return sizes | {"model_type": default.model_type} | OWN.get(default.model_type, {})


def _has(config, name: str) -> bool:
    """Whether a configuration has an entry, with a value or as one of these that are None by default."""
    try:
        value = getattr(config, name, None)
    except Exception:  # an entry that differs by layer has no value for all
        return True
    return value is not None or name in NONE_BY_DEFAULT and hasattr(config, name)


def small_module(kind: str, seed: int = 1, **entries):
    """A module of a type with random weights, in evaluation mode, with transformers' own attention. `entries`: as of
    `small_config`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = small_config(kind, **entries)
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    made = found[0] if isinstance(found, tuple) else found
    if made.config_class is config.sub_configs.get("text_config"):  # as `AutoModelForCausalLM` does
        config = config.get_text_config()
    torch.manual_seed(seed)
    module = made._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:
                weight.copy_(values * weight.shape[-1] ** -0.5)
            else:
                weight.add_(values * (0.5 if "sink" in name else 0.1))
    module.config.architectures = [made.__name__]
    return module


def save(kind: str, folder: Path, seed: int = 1, **entries):
    """Writes a small folder of a type, with a tokenizer; returns its module. `entries`: as of `small_config`."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar has a thread, and worlds are forked from this process
    module = small_module(kind, seed, **entries)
    small_tokenizers.characters(folder)
    module.save_pretrained(folder)
    if module.config.model_type != kind:  # the language model's part
        small_config(kind).save_pretrained(folder)
    return module


def running() -> dict[str, bool]:
    """Types that run, by the generated page, and whether megarl maps them, too."""
    part = PAGE.read_text().partition("## Run")[2].partition("\n## ")[0]
    return {kind: mapped == "yes" for kind, mapped in re.findall(r"^\| `(\S+)` \| (yes)? ?\|", part, re.MULTILINE)}
