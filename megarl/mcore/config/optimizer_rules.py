"""Rules on the optimizer's flags. A rule is data, as in `layout_rules`."""

import functools
import importlib.metadata

from megarl import bundled
from megarl.errors import Rule
from megarl.mcore.config.rules import allow, defaults, min_value, positive, value_of

SGD, MUON = "sgd", "muon"
MUON_NAMES = (MUON, "dist_muon")  # the second is Megatron's older name of the first with --use-distributed-optimizer
PACKAGE = "emerging-optimizers"  # Muon's
# Flags that only one optimizer reads -> Megatron's default, or megarl's.
ADAM_FLAGS = {"adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8}
MUON_FLAGS = {
    "muon-momentum": 0.9, "muon-nesterov": False, "muon-scale-mode": "spectral", "muon-fp32-matmul-prec": "medium",
    "muon-coefficient-type": "quintic", "muon-num-ns-steps": 5, "muon-tp-mode": "duplicated",
    "muon-extra-scale-factor": 1.0,
}  # fmt: skip
MOMENT_TYPES = ("fp32", "bf16")  # others would need a scale for each tensor
# A moment of bf16 does not move by changes below 2^-9 to 2^-8 of itself. With Megatron's 0.999 it would never fall.
MAX_BETA_BF16 = 0.99
PRECISIONS = ("medium", "high", "highest")  # torch's


@functools.cache
def has_muon() -> bool:
    """Whether a version of Muon's package is installed that Megatron uses."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (0, 2)


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    is_sgd = args.optimizer == SGD
    decays = any((args.weight_decay, args.start_weight_decay, args.end_weight_decay))
    multipliers = args.weight_decay_multipliers
    return [
        *_muon(args),
        *_moments(args),
        allow("--sgd-momentum", is_sgd or args.sgd_momentum == 0.9, "none without --optimizer sgd"),
        allow("--sgd-momentum", 0 <= args.sgd_momentum < 1, "from 0 to below 1"),
        *defaults(args, ADAM_FLAGS, not is_sgd, f"none with --optimizer {args.optimizer}"),
        allow("--weight-decay-multipliers", decays or not multipliers,
              "none without a --weight-decay above 0", value=" ".join(multipliers or [])),
    ]  # fmt: skip


def _moments(args) -> list[Rule]:
    first, second, is_on = args.exp_avg_dtype, args.exp_avg_sq_dtype, args.use_precision_aware_optimizer
    betas = (("adam-beta1", first), ("adam-beta2", second))
    switch = "--use-precision-aware-optimizer"
    return [
        *defaults(args, {"exp-avg-dtype": "fp32", "exp-avg-sq-dtype": "fp32"}, is_on, f"fp32 without {switch}"),
        allow(switch, not is_on or args.optimizer == "adam", "none without --optimizer adam"),
        allow(switch, not is_on or (first, second) != ("fp32", "fp32"),
              "none without --exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16"),
        *(allow(f"--{flag}", dtype != "bf16" or value_of(args, flag) <= MAX_BETA_BF16,
                f"at most {MAX_BETA_BF16} with a moment of bf16, which would not follow the gradients")
          for flag, dtype in betas),
    ]  # fmt: skip


def _muon(args) -> list[Rule]:
    is_on, where = args.optimizer in MUON_NAMES, f"with --optimizer {args.optimizer}"
    tensor, groups, kinds = args.tensor_model_parallel_size, args.num_query_groups, _coefficient_types()
    has_groups = args.group_query_attention and not args.multi_latent_attention
    return [
        allow("--optimizer", not is_on or has_muon(),
                   f"adam or sgd without the package {PACKAGE}; run {bundled.install_command('optimizers')}"),
        allow("--muon-no-split-qkv", is_on or args.muon_split_qkv, "none without --optimizer muon", value=True),
        *defaults(args, MUON_FLAGS, is_on, "none without --optimizer muon"),
        allow("--muon-momentum", 0 <= args.muon_momentum < 1, "from 0 to below 1"),
        positive(args, "--muon-extra-scale-factor"),
        min_value(args, "--muon-num-ns-steps"),
        allow("--muon-coefficient-type",
                   not is_on or not kinds or args.muon_coefficient_type in kinds, f"one of {', '.join(kinds)}"),
        allow("--fp16", not is_on or not args.fp16, f"none {where}"),
        allow("--use-torch-fsdp2", not is_on or not args.use_torch_fsdp2, f"none {where}"),
        allow("--tensor-model-parallel-size", not is_on or not has_groups or tensor <= groups,
                   f"at most --num-query-groups {groups} {where}"),
    ]  # fmt: skip


def _coefficient_types() -> tuple[str, ...]:
    """Sets of coefficients that Muon's package has, "custom" apart, which no flag gives; () without the package."""
    if not has_muon():
        return ()
    from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

    return tuple(name for name in get_supported_coefficient_types() if name != "custom")
