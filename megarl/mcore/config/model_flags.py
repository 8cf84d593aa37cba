"""Flags for layers that Megatron's parser cannot describe. They join its parser, so they may carry role prefixes.

Each becomes an attribute of the role's namespace and of the model's config.
"""

from collections.abc import Callable
from typing import NamedTuple


class ModelFlag(NamedTuple):
    """A flag without its dashes, the type of its value (None: a switch), its default, and what it means."""

    name: str
    kind: Callable | None
    default: object
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")


def number(text: str) -> int | float:
    """Parses an int, or a float if it is not whole."""
    value = float(text)
    return int(value) if value.is_integer() else value


def divisors_of(text: str) -> list[float]:
    """The numbers of `--rotary-divisors`; empty if they are none above 0."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        return []
    return found if all(0 < each < float("inf") for each in found) else []


MODEL_FLAGS = (
    ModelFlag("layernorm-position", str, "pre", "norms of a layer: before attention and MLP, after them (OLMo 2), or "
              "both (Gemma 2)", ("pre", "post", "sandwich")),
    ModelFlag("qk-layernorm-all-heads", None, False, "RMSNorm of queries and of keys, over all heads (OLMo 2)"),
    ModelFlag("latent-norm-epsilon", float, None, "epsilon of the norms of latents (default --norm-epsilon)"),
    ModelFlag("embedding-multiplier", float, None, "factor of the embeddings, rounded to their type (Gemma)"),
    ModelFlag("geglu", None, False, "gated MLP with GELU (Gemma)"),
    ModelFlag("gelu-approximation", str, None, "form of GELU, as PyTorch names them: none is the exact one, with erf; "
              "default: tanh with --geglu, else none", ("none", "tanh")),
    ModelFlag("attn-logit-softcapping", float, None, "c of attention scores c·tanh(score/c) (Gemma 2)"),
    ModelFlag("final-logit-softcapping", float, None, "c of logits c·tanh(logit/c) (Gemma 2)"),
    ModelFlag("query-pre-attn-scalar", float, None, "attention scores are divided by its root (default --kv-channels)"),
    ModelFlag("window-rotary-base", number, None, "rotary base, without scaling, of layers with a window (Gemma 3)"),
    ModelFlag("rotary-divisors", str, None, "numbers, with commas between them, that divide the frequencies of pairs of"
              " rotated channels (LongRoPE)"),
    ModelFlag("rotary-attention-factor", float, None, "factor of cosines and sines (LongRoPE; default 1, or YaRN's)"),
    ModelFlag("moe-router-group-score", str, "sum", "score of --moe-router-num-groups: of its best experts, their sum "
              "(DeepSeek-V3) or the largest (DeepSeek-V2)", ("sum", "max")),
    ModelFlag("mamba-dt-min", float, 0.0, "smallest time step Δ of the Mamba-2 layers of --hybrid-layer-pattern "
              "(Nemotron-H)"),
    ModelFlag("rope-low-freq-factor", float, None, "of --use-rope-scaling (default 1)"),
    ModelFlag("rope-high-freq-factor", float, None, "of --use-rope-scaling (default 4)"),
    ModelFlag("rope-original-max-position-embeddings", int, None, "of --use-rope-scaling (default 8192)"),
)  # fmt: skip
SCORE_BACKENDS = ("eager",)  # attention backends for models that `has_score_options`
ROTARY = ("rope", "yarn")  # values of --position-embedding-type with rotary embeddings


def add_to(parser):
    """Adds the flags to an argparse parser; numbers of rotary embeddings need not be whole."""
    for action in parser._actions:
        if action.dest in ("rotary_base", "rotary_seq_len_interpolation_factor"):
            action.type = number
    group = parser.add_argument_group("megarl's layers")
    for flag in MODEL_FLAGS:
        if flag.kind is None:
            group.add_argument(f"--{flag.name}", action="store_true", help=flag.help)
        else:
            group.add_argument(
                f"--{flag.name}", type=flag.kind, default=flag.default, choices=flag.choices, help=flag.help
            )


def attributes() -> frozenset[str]:
    """The attributes that the flags set."""
    return frozenset(flag.attribute for flag in MODEL_FLAGS)


def has_score_options(args) -> bool:
    """Whether attention scores are more than scaled products: a softcap or sinks."""
    return args.attn_logit_softcapping is not None or args.softmax_type != "vanilla"


def is_gated(args) -> bool:
    """Whether MLPs have a gate."""
    return args.swiglu or args.quick_geglu or args.geglu


def has_gelu(args) -> bool:
    """Whether the activation of MLPs is GELU, with a gate or without."""
    return not (args.swiglu or args.squared_relu or args.quick_geglu)


def is_gelu_exact(args) -> bool:
    """Whether it is the exact one."""
    return (args.gelu_approximation or ("tanh" if args.geglu else "none")) == "none"


def copy_to(config, args):
    """Sets the flags' attributes on a model's config."""
    for name in attributes():
        setattr(config, name, getattr(args, name))
