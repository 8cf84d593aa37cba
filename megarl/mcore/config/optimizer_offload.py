"""`--optimizer-cpu-offload`: rules on its flags, and which parameters' states are on the host."""

import numpy as np

from megarl.errors import Rule
from megarl.mcore.config.rules import allow, defaults, require

FLAG = "--optimizer-cpu-offload"
UNTRAINED = ("reference", "rollout", "teacher")  # roles that have the flag if it has no prefix


def check(role: str, args):
    """Raises UsageError for the first rule that the flags of a role break that may be trained."""
    if role not in UNTRAINED:
        require(role, args, rules(args))


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    is_on, only = args.optimizer_cpu_offload, f"none without {FLAG}"
    return [
        allow(FLAG, not is_on or args.optimizer == "adam", "none without --optimizer adam"),
        allow(FLAG, not is_on or not args.use_torch_fsdp2, "none with --use-torch-fsdp2"),
        allow(FLAG, not is_on or args.use_distributed_optimizer,
              "none without --use-distributed-optimizer, which may have a single rank"),
        *defaults(args, {"optimizer-offload-fraction": 1}, is_on, only),
        allow("--optimizer-offload-fraction", 0 < args.optimizer_offload_fraction <= 1, "above 0, at most 1"),
        allow("--overlap-cpu-optimizer-d2h-h2d", is_on or not args.overlap_cpu_optimizer_d2h_h2d, only),
        allow("--no-pin-cpu-grads", is_on or args.pin_cpu_grads, only, value=True),
    ]  # fmt: skip


def on_host(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which parameters have their states on the host: the largest that fit into the fraction, one after another.

    So the host has the fraction, less a part that is smaller than the states of any parameter left on the device.

    Args:
        sizes: [ranks, parameters] bytes of the states on each rank; 0 for a parameter that it has no share of.

    Returns:
        [ranks, parameters] of bool; False where the size is 0.
    """
    limits, taken = np.floor(sizes.sum(1) * fraction), np.zeros(len(sizes), dtype=np.int64)
    chosen, ranks = np.zeros(sizes.shape, dtype=bool), np.arange(len(sizes))
    for column in np.argsort(-sizes, axis=1, kind="stable").T:
        size = sizes[ranks, column]
        fits = (size > 0) & (taken + size <= limits)
        taken += np.where(fits, size, 0)
        chosen[ranks, column] = fits
    return chosen
