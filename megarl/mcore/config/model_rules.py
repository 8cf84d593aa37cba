"""Rules on flags that describe a model's layers: values that the layers compute, and flags that would have no effect.

A rule is data, as in `layout_rules`.
"""

import math

from megarl.mcore.config.layout_rules import LayoutRule, require


def check(role: str, args):
    """Raises UsageError for the first rule that a role's parsed flags break."""
    require(role, rules(args))


def rules(args) -> list[LayoutRule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    return _windows(args) + _layers(args)


def _windows(args) -> list[LayoutRule]:
    size, freq, layers = args.window_size, args.window_attn_skip_freq, args.num_layers
    fits = freq is None or (freq > 1 if isinstance(freq, int) else _is_pattern(freq, layers) and 1 in freq)
    return [
        LayoutRule("--window-size", size, size is None or len(size) == 2 and size[0] >= 0 and size[1] == 0,
             "N,0 with N of 0 or more: a token sees itself and the N tokens before it"),
        LayoutRule("--window-attn-skip-freq", freq, freq is None or size is not None, "none without --window-size"),
        LayoutRule("--window-attn-skip-freq", freq, fits,
             f"a number above 1, or a pattern of {layers} zeros (full attention) and ones, with a one"),
    ]  # fmt: skip


def _layers(args) -> list[LayoutRule]:
    multiplier, all_heads, kind = args.embedding_multiplier, args.qk_layernorm_all_heads, args.normalization
    others = [name for name in ("swiglu", "squared-relu", "quick-geglu") if getattr(args, name.replace("-", "_"))]
    return [
        LayoutRule("--embedding-multiplier", multiplier, multiplier is None or 0 < multiplier < math.inf, "above 0"),
        LayoutRule("--qk-layernorm-all-heads", all_heads, not all_heads or not args.qk_layernorm,
             "none with --qk-layernorm, which norms each head"),
        LayoutRule("--qk-layernorm-all-heads", all_heads, not all_heads or kind == "RMSNorm",
             f"none with --normalization {kind}: it is an RMSNorm"),
        LayoutRule("--qk-layernorm-all-heads", all_heads, not all_heads or not args.layernorm_zero_centered_gamma,
             "none with --apply-layernorm-1p"),
        LayoutRule("--geglu", args.geglu, not args.geglu or not others, f"none with --{' --'.join(others)}"),
    ]  # fmt: skip


def _is_pattern(pattern: list[int], layers: int) -> bool:
    return len(pattern) == layers and set(pattern) <= {0, 1}
