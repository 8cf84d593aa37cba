"""Models of tests/references/hf_models in any layout: their flags, their weights, and megarl's numbers for them.

The weights are placed tensor by tensor in Megatron's layout-free coordinates.
"""

import re
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.helpers import hf_folders
from tests.helpers.engines import settings_of
from tests.helpers.tiny_models import one_microbatch
from tests.helpers.worlds import SAFETY, run_world

GREEDY = 64  # tokens of the stored continuations
LENGTHS = "--max-prompt-length 32 --max-response-length 64"

# Key after `decoder.layers.N.` -> tensors after `model.layers.N.`, one after another.
ROWS = {
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "self_attention.linear_proj.bias": ["self_attn.o_proj.bias"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "mlp.router.weight": ["mlp.router.weight"],
    "mlp.router.bias": ["mlp.router.bias"],
    "self_attention.core_attention.softmax_offset": ["self_attn.sinks"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "self_attention.q_norm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_norm.weight": ["self_attn.k_norm.weight"],
    "post_self_attn_layernorm.weight": ["post_attention_layernorm.weight"],
    "post_mlp_layernorm.weight": ["post_feedforward_layernorm.weight"],
}
GEMMA = ROWS | {"mlp.linear_fc1.layer_norm_weight": ["pre_feedforward_layernorm.weight"]}
MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

SANDWICH = ["--geglu", "--layernorm-position", "sandwich", "--apply-layernorm-1p", "--embedding-multiplier", 8.0]
FAMILY_FLAGS = {
    "qwen2": ["--swiglu", "--add-qkv-bias"],
    "qwen3": ["--swiglu", "--qk-layernorm"],
    "olmo2": ["--swiglu", "--layernorm-position", "post", "--qk-layernorm-all-heads"],
    "olmo3": ["--swiglu", "--layernorm-position", "post", "--qk-layernorm-all-heads"],
    "gpt_oss": ["--quick-geglu", "--glu-linear-offset", 1.0, "--softmax-type", "learnable"],
    "gemma2": SANDWICH,
    "gemma3": [*SANDWICH, "--qk-layernorm"],
}


def flags_of(config: dict[str, Any]) -> list:
    """The flags of a config.json, for what these models have."""
    flags = [
        "--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"],
        "--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", config["num_attention_heads"],
        "--group-query-attention", "--num-query-groups", config["num_key_value_heads"],
        "--kv-channels", config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "--normalization", "RMSNorm", "--norm-epsilon", config["rms_norm_eps"],
        "--make-vocab-size-divisible-by", 4,
        *FAMILY_FLAGS.get(config["model_type"].removesuffix("_text"), ["--swiglu"]),
    ]  # fmt: skip
    flags += _expert_flags(config) if config["model_type"] == "gpt_oss" else ["--disable-bias-linear"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        if config.get(name) is not None:
            flags += [f"--{name.replace('_', '-')}", config[name]]
    if not config["tie_word_embeddings"]:
        flags.append("--untie-embeddings-and-output-weights")
    return flags + _window_flags(config) + _rotary_flags(config["rope_parameters"])


def _rotary_flags(rope: dict[str, Any]) -> list:
    if "full_attention" in rope:
        return [*_rotary_flags(rope["full_attention"]), "--window-rotary-base", rope["sliding_attention"]["rope_theta"]]
    flags, kind = ["--rotary-base", rope["rope_theta"]], rope["rope_type"]
    if kind == "linear":
        flags += ["--rotary-seq-len-interpolation-factor", rope["factor"]]
    if kind == "llama3":
        flags += [
            "--use-rope-scaling", "--rope-scaling-factor", rope["factor"], "--rope-low-freq-factor",
            rope["low_freq_factor"], "--rope-high-freq-factor", rope["high_freq_factor"],
            "--rope-original-max-position-embeddings", rope["original_max_position_embeddings"],
        ]  # fmt: skip
    if kind == "yarn":
        flags += [
            "--position-embedding-type", "yarn", "--rotary-scaling-factor", rope["factor"],
            "--yarn-original-max-position-embeddings", rope["original_max_position_embeddings"],
            "--yarn-beta-fast", rope.get("beta_fast", 32.0), "--yarn-beta-slow", rope.get("beta_slow", 1.0),
        ]  # fmt: skip
        flags += [] if rope.get("truncate", True) else ["--no-yarn-correction-range-round-to-int"]
    return flags


def _expert_flags(config: dict[str, Any]) -> list:
    return [
        "--num-experts", config["num_local_experts"], "--moe-router-topk", config["num_experts_per_tok"],
        "--moe-ffn-hidden-size", config["intermediate_size"], "--moe-router-load-balancing-type", "none",
        "--moe-router-dtype", "fp32", "--activation-func-clamp-value", config["swiglu_limit"],
    ]  # fmt: skip


def _window_flags(config: dict[str, Any]) -> list:
    kinds = config.get("layer_types") or []
    if config.get("sliding_window") is None or kinds and "sliding_attention" not in kinds:
        return []
    flags = ["--window-size", f"{config['sliding_window'] - 1},0"]
    pattern = [int(kind == "sliding_attention") for kind in kinds]
    return flags + (["--window-attn-skip-freq", str(pattern).replace(" ", "")] if 0 in pattern else [])


def whole_tensor(key: str, index: tuple[int, ...], weights: dict[str, torch.Tensor], config) -> torch.Tensor:
    """The tensor of a key and index in Megatron's layout; takes what it uses out of `weights`' copy of names."""
    if key in MODEL:
        return weights[MODEL[key]]
    layer, rest, name = _place(key, index)
    prefix = f"model.layers.{layer}."
    if name.startswith("self_attention.linear_qkv.") and "norm" not in name:
        kind = name.rsplit(".", 1)[1]
        return _by_group([weights[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"], config)
    if name.startswith("mlp.experts."):
        return _of_expert(weights, f"{prefix}mlp.experts.", name, rest[0])
    rows = GEMMA if config["model_type"].startswith("gemma") else ROWS
    return torch.cat([weights[prefix + tensor] for tensor in rows[name]])


def _place(key: str, index: tuple[int, ...]) -> tuple[int, tuple[int, ...], str]:
    """(layer, other indices, name in the layer): unlike layers are numbered in the key, others are stacked."""
    number, name = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", key).groups()
    return (int(number), index, name) if number else (index[0], index[1:], name)


def _by_group(parts: list[torch.Tensor], config) -> torch.Tensor:
    """Queries, keys and values -> for each key/value group its queries, its key, its value."""
    groups = config["num_key_value_heads"]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _of_expert(weights, prefix: str, name: str, expert: int) -> torch.Tensor:
    """GPT-OSS: all experts in one tensor, transposed; gates and ups in turn."""
    projection, kind = name.split(".")[-2:]
    source = prefix + {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[projection]
    tensor = weights[source + ("_bias" if kind == "bias" else "")][expert]
    tensor = tensor if kind == "bias" else tensor.t()
    return torch.cat([tensor[::2], tensor[1::2]]) if projection == "linear_fc1" else tensor


class Found(NamedTuple):
    """megarl's numbers for the stored sequences and prompt."""

    logprobs: list[torch.Tensor] | None  # of each sequence; None except on the last pipeline stage
    greedy: list[int]
    gap: float | None  # of the greedy continuation to the training forward


def scores_and_continuation(rank, case: str, layout: str) -> Found:
    """Loads a case into a layout and runs the training forward and the rollout engine."""
    from megarl import arguments
    from megarl.comm import role_mesh
    from megarl.mcore.model.gpt import build_model

    content, reference = hf_folders.stored(case), hf_folders.reference(case)
    argv = [*map(str, flags_of(content["config"])), *LENGTHS.split(), *layout.split()]
    roles = arguments.parse(argv, dist.get_world_size(), "sft").roles
    args, groups = roles["actor"].megatron, role_mesh.create_mesh(roles, SAFETY)["actor"].pg_collection
    vocab_size = content["config"]["vocab_size"]
    stages = build_model(args, vocab_size, groups)
    fill(stages, groups, hf_folders.weights(case), content["config"])
    logprobs = _logprobs(stages, groups, reference.tokens, vocab_size)
    if args.context_parallel_size > 1 or args.virtual_pipeline_model_parallel_size:
        return Found(logprobs, [], None)
    return Found(logprobs, *_continuation(stages, groups, reference.prompt, vocab_size))


@torch.no_grad()
def fill(stages, groups, weights: dict[str, torch.Tensor], config):
    """Copies this rank's boxes of the weights."""
    from megarl.mcore.weights.reshard_plan import LocalWeights

    local = LocalWeights(stages, groups)
    for shard in local.description().shards:
        whole = whole_tensor(shard.key, shard.index, weights, config)
        box = whole[tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.shape, strict=True))]
        local.view(shard).copy_(box)


def _logprobs(stages, groups, rows: list[list[int]], vocab_size: int) -> list[torch.Tensor] | None:
    from megarl.mcore.model import forward_pass
    from megarl.roles.trainable_model import forward_only

    def forward(chunk, part):
        return forward_pass.token_scores(chunk, part.tokens, part.lengths, 1.0, vocab_size)

    ((scores, places),) = forward_only(stages, one_microbatch(rows), forward, groups)
    return [row[1:] for row in scores.logprobs.split([len(row) for row in rows])] if len(places) else None


def _continuation(stages, groups, prompt: list[int], vocab_size: int) -> tuple[list[int], float | None]:
    from megarl.mcore.inference.engine import GenerationRequest, RolloutEngine

    engine = RolloutEngine(
        stages[0], groups, vocab_size, len(prompt) + GREEDY, 0.01, 4, prefix_caching=True, chunked_prefill=True
    )
    requests = [GenerationRequest(prompt[:n], 0, GREEDY) for n in (len(prompt), len(prompt) // 2, 3)]
    done = engine.generate(requests, (), settings_of(greedy=True))
    rows = [request.prompt + found.tokens for request, found in zip(requests, done, strict=True)]
    recomputed = _logprobs(stages, groups, rows, vocab_size)
    if recomputed is None:
        return done[0].tokens, None
    gaps = [(row[-GREEDY:] - torch.tensor(found.logprobs)).abs().max() for row, found in zip(recomputed, done)]
    return done[0].tokens, float(torch.stack(gaps).max())


def check_case(case: str, size: int, layout: str, largest_gap: float):
    """Log-probs within 1e-5 of transformers' and the same greedy tokens, on every rank that has them."""
    reference, seen = hf_folders.reference(case), 0
    for found in run_world(scores_and_continuation, size, case, layout):
        if found.logprobs is not None:
            seen += 1
            for row, expected in zip(found.logprobs, reference.logprobs, strict=True):
                assert (row - expected).abs().max() <= 1e-5
        if found.greedy:
            assert found.greedy == reference.greedy
        assert found.gap is None or found.gap <= largest_gap
    assert seen
