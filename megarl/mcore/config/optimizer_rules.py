"""Rules on the optimizer's flags. A rule is data, as in `layout_rules`."""

from megarl.mcore.config.layout_rules import LayoutRule, require, value_of

SGD = "sgd"
# Flags that only one optimizer reads -> Megatron's default.
ADAM_FLAGS = {"adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8}


def check(role: str, args):
    """Raises UsageError for the first rule that a role's parsed flags break."""
    require(role, rules(args))


def rules(args) -> list[LayoutRule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    is_sgd, decays = args.optimizer == SGD, any(
        (args.weight_decay, args.start_weight_decay, args.end_weight_decay)
    )  # fmt: skip
    multipliers = args.weight_decay_multipliers
    return [
        LayoutRule("--sgd-momentum", args.sgd_momentum, is_sgd or args.sgd_momentum == 0.9,
                   "none without --optimizer sgd"),
        LayoutRule("--sgd-momentum", args.sgd_momentum, 0 <= args.sgd_momentum < 1, "from 0 to below 1"),
        *(LayoutRule(f"--{name}", value_of(args, name), not is_sgd or value_of(args, name) == default,
                     f"none with --optimizer {args.optimizer}") for name, default in ADAM_FLAGS.items()),
        LayoutRule("--weight-decay-multipliers", " ".join(multipliers or []), decays or not multipliers,
                   "none without a --weight-decay above 0"),
    ]  # fmt: skip
