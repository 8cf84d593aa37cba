"""Flags that say what an optimizer does with each parameter: rules on them, patterns of names, and states on the host.

`--freeze`, `--lr-multipliers` and `--weight-decay-multipliers` have patterns of parameter names. A name is that of
Megatron's model without its parallel layout: layers are numbered over all pipeline stages, the experts of a layer share
one name, and a head tied to the embedding has the embedding's name. `*` stands for any text, as in a shell. The flags
join Megatron's parser, so they may carry role prefixes.
"""

import argparse
import fnmatch
import functools
import importlib.metadata
import math
import re
from collections.abc import Iterable

import numpy as np

from megarl import bundled
from megarl.errors import Rule
from megarl.mcore.config.rules import allow, defaults, min_value, positive, require, value_of, when

SGD, MUON = "sgd", "muon"
MUON_NAMES = (MUON, "dist_muon")  # the second is Megatron's older name of the first with --use-distributed-optimizer
PACKAGE = "emerging-optimizers"  # Muon's
# Flags that only one optimizer reads -> Megatron's default, or megarl's.
ADAM_FLAGS = {"adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8}
MUON_FLAGS = {
    "muon-momentum": 0.9,
    "muon-nesterov": False,
    "muon-scale-mode": "spectral",
    "muon-fp32-matmul-prec": "medium",
    "muon-coefficient-type": "quintic",
    "muon-num-ns-steps": 5,
    "muon-tp-mode": "duplicated",
    "muon-extra-scale-factor": 1.0,
}
MOMENT_TYPES = ("fp32", "bf16")  # others would need a scale for each tensor
# A moment of bf16 does not move by changes below 2^-9 to 2^-8 of itself. With Megatron's 0.999 it would never fall.
MAX_BETA_BF16 = 0.99
PRECISIONS = ("medium", "high", "highest")  # torch's
OFFLOAD = "--optimizer-cpu-offload"
UNTRAINED = ("reference", "rollout", "teacher")  # roles that have it if it has no prefix
FREEZE, LEARNING_RATES, WEIGHT_DECAYS = "freeze", "lr_multipliers", "weight_decay_multipliers"
ATTRIBUTES = frozenset({FREEZE, LEARNING_RATES, WEIGHT_DECAYS})
MODULE = "hf."  # of names of weights in a module of transformers
_EXPERT = re.compile(r"\.local_experts\.\d+")


def check(role: str, args):
    """Raises UsageError for the first rule that a role's parsed flags break, before Megatron's own validation."""
    require(role, args, _rules(args))
    if role not in UNTRAINED:
        require(role, args, _offload_rules(args))


@functools.cache
def has_muon() -> bool:
    """Whether a version of Muon's package is installed that Megatron uses."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (0, 2)


def _rules(args) -> list[Rule]:
    is_sgd = args.optimizer == SGD
    decays = any((args.weight_decay, args.start_weight_decay, args.end_weight_decay))
    multipliers, texts = args.weight_decay_multipliers, " ".join(args.weight_decay_multipliers or [])
    return [
        *_muon(args),
        *_moments(args),
        allow("--sgd-momentum", is_sgd or args.sgd_momentum == 0.9, "none without --optimizer sgd"),
        allow("--sgd-momentum", 0 <= args.sgd_momentum < 1, "from 0 to below 1"),
        *defaults(args, ADAM_FLAGS, not is_sgd, f"none with --optimizer {args.optimizer}"),
        allow("--weight-decay-multipliers", decays or not multipliers, "none without a --weight-decay above 0", texts),
    ]


def _moments(args) -> list[Rule]:
    first, second, is_on = args.exp_avg_dtype, args.exp_avg_sq_dtype, args.use_precision_aware_optimizer
    betas = (("adam-beta1", first), ("adam-beta2", second))
    switch = "--use-precision-aware-optimizer"
    needs = "none without --exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16"
    follows = f"at most {MAX_BETA_BF16} with a moment of bf16, which would not follow the gradients"
    fit = [(flag, dtype != "bf16" or value_of(args, flag) <= MAX_BETA_BF16) for flag, dtype in betas]
    return [
        *defaults(args, {"exp-avg-dtype": "fp32", "exp-avg-sq-dtype": "fp32"}, is_on, f"fp32 without {switch}"),
        allow(switch, not is_on or args.optimizer == "adam", "none without --optimizer adam"),
        allow(switch, not is_on or (first, second) != ("fp32", "fp32"), needs),
        *(allow(f"--{flag}", fits, follows) for flag, fits in fit),
    ]


def _muon(args) -> list[Rule]:
    is_on, where = args.optimizer in MUON_NAMES, f"with --optimizer {args.optimizer}"
    tensor, groups, kinds = args.tensor_model_parallel_size, args.num_query_groups, _coefficient_types()
    has_groups = args.group_query_attention and not args.multi_latent_attention
    others = f"adam or sgd without the package {PACKAGE}; run {bundled.install_command('optimizers')}"
    has_kind, few = args.muon_coefficient_type in kinds or not kinds, f"at most --num-query-groups {groups} {where}"
    found = [
        allow("--muon-coefficient-type", has_kind, f"one of {', '.join(kinds)}"),
        allow("--fp16", not args.fp16, f"none {where}"),
        allow("--use-torch-fsdp2", not args.use_torch_fsdp2, f"none {where}"),
        allow("--tensor-model-parallel-size", not has_groups or tensor <= groups, few),
    ]
    return [
        allow("--optimizer", not is_on or has_muon(), others),
        allow("--muon-no-split-qkv", is_on or args.muon_split_qkv, "none without --optimizer muon", value=True),
        *defaults(args, MUON_FLAGS, is_on, "none without --optimizer muon"),
        allow("--muon-momentum", 0 <= args.muon_momentum < 1, "from 0 to below 1"),
        positive(args, "--muon-extra-scale-factor"),
        min_value(args, "--muon-num-ns-steps"),
        *when(is_on, found),
    ]


def _coefficient_types() -> tuple[str, ...]:
    """Sets of coefficients that Muon's package has, "custom" apart, which no flag gives; () without the package."""
    if not has_muon():
        return ()
    from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

    return tuple(name for name in get_supported_coefficient_types() if name != "custom")


# -- parameters by name ------------------------------------------------------------------------------------------


def add_to(parser: argparse.ArgumentParser):
    """Adds the flags to an argparse parser."""
    group = parser.add_argument_group("parameters by name")
    frozen = "parameters that are not trained, as embedding.* 'decoder.layers.0.*'"
    group.add_argument("--freeze", nargs="+", metavar="PATTERN", help=frozen)
    last = "of several patterns that name a parameter the last one counts"
    for flag, what in (("lr", "learning rates"), ("weight-decay", "weight decays")):
        help_text = f"factors of the {what} of parameters, as '*.mlp.router.*=0.1'; {last}"
        group.add_argument(f"--{flag}-multipliers", nargs="+", type=_checked, metavar="PATTERN=FACTOR", help=help_text)


def is_multiplier(text: str) -> bool:
    """Whether a text is `PATTERN=FACTOR` with a factor of 0 or more."""
    try:
        pattern, factor = factor_of(text)
    except ValueError:
        return False
    return bool(pattern) and 0 <= factor < math.inf


def _checked(text: str) -> str:
    """`PATTERN=FACTOR` as it is; argparse.ArgumentTypeError for another text."""
    if not is_multiplier(text):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is PATTERN=FACTOR with a factor of 0 or more")
    return text


def factor_of(text: str) -> tuple[str, float]:
    """(pattern, factor) of a checked `PATTERN=FACTOR`."""
    pattern, _, number = text.rpartition("=")
    return pattern, float(number)


def patterns_of(args, attribute: str) -> list[str]:
    """The patterns of a flag, in their order; [] if it is not given. `args`: a role's Megatron namespace."""
    texts = getattr(args, attribute, None) or []
    return list(texts) if attribute == FREEZE else [factor_of(text)[0] for text in texts]


def frozen_patterns(args) -> list[str]:
    """The patterns of `--freeze`, of indexers, and of what is never trained in a module of transformers."""
    own = () if args.model_folder is None else args.model_folder.reach().untrained
    return [*patterns_of(args, FREEZE), *(["*.indexer.*"] if args.dsa_indexer_topk is not None else []), *own]


def layout_free(name: str) -> str:
    """The name that patterns are matched with, of one with layers numbered over the whole model; in a module of
    transformers that of its own."""
    return _EXPERT.sub("", name).removeprefix(MODULE)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names a parameter; `name`: as of `layout_free`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_frozen(args, name: str) -> bool:
    """Whether a role does not train a parameter; `name`: as of `layout_free`."""
    return matches(name, frozen_patterns(args))


def multiplier(args, attribute: str, name: str) -> float:
    """The factor of a parameter's learning rate or weight decay; 1 if no pattern names it."""
    factors = map(factor_of, reversed(getattr(args, attribute, None) or []))
    return next((factor for pattern, factor in factors if matches(name, [pattern])), 1.0)


# -- states on the host ------------------------------------------------------------------------------------------


def _offload_rules(args) -> list[Rule]:
    is_on, only = args.optimizer_cpu_offload, f"none without {OFFLOAD}"
    distributed = "none without --use-distributed-optimizer, which may have a single rank"
    return [
        allow(OFFLOAD, not is_on or args.optimizer == "adam", "none without --optimizer adam"),
        allow(OFFLOAD, not is_on or not args.use_torch_fsdp2, "none with --use-torch-fsdp2"),
        allow(OFFLOAD, not is_on or args.use_distributed_optimizer, distributed),
        *defaults(args, {"optimizer-offload-fraction": 1}, is_on, only),
        allow("--optimizer-offload-fraction", 0 < args.optimizer_offload_fraction <= 1, "above 0, at most 1"),
        allow("--overlap-cpu-optimizer-d2h-h2d", is_on or not args.overlap_cpu_optimizer_d2h_h2d, only),
        allow("--no-pin-cpu-grads", is_on or args.pin_cpu_grads, only, value=True),
    ]


def on_host(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which parameters have their states on the host: the largest that fit into the fraction, one after another.

    So the host has the fraction, less a part that is smaller than the states of any parameter left on the device.
    `sizes`: [ranks, parameters] bytes of the states on each rank, 0 for a parameter that it has no share of; the result
    [ranks, parameters] is False there.
    """
    limits, taken = np.floor(sizes.sum(1) * fraction), np.zeros(len(sizes), dtype=np.int64)
    chosen, ranks = np.zeros(sizes.shape, dtype=bool), np.arange(len(sizes))
    for column in np.argsort(-sizes, axis=1, kind="stable").T:
        size = sizes[ranks, column]
        fits = (size > 0) & (taken + size <= limits)
        taken += np.where(fits, size, 0)
        chosen[ranks, column] = fits
    return chosen
