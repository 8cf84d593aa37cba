"""What `--transformer-impl transformer_engine` needs, and with which flags its layers would be wrong or untried."""

import importlib.util

from megarl.errors import Rule, UsageError
from megarl.mcore import device
from megarl.mcore.config.rules import allow, require

FLAG, NAME = "--transformer-impl", "transformer_engine"


def check(role: str, args):
    """Raises UsageError if a role has Transformer Engine's layers and they cannot run here or with its other flags."""
    if args.transformer_impl != NAME:
        return
    if missing := _missing():
        raise UsageError(f"{role}: {FLAG} {NAME} needs {' and '.join(missing)}")
    require(role, args, rules(args))


def _missing() -> list[str]:
    has_package = importlib.util.find_spec(NAME) is not None
    lacks = {"a CUDA device": not device.has_cuda(), "the package transformer-engine[pytorch]": not has_package}
    return [name for name, is_missing in lacks.items() if is_missing]


def rules(args) -> list[Rule]:
    """Returns the rules for a role with Transformer Engine's layers, in the manner of `layout_rules`."""
    experts, with_it = args.num_experts, f"with {FLAG} {NAME}"
    return [
        allow("--multi-latent-attention", not args.multi_latent_attention,
              f"none {with_it}, which fuses the norm of latents that the KV cache holds"),
        allow("--use-torch-fsdp2", not args.use_torch_fsdp2, f"none {with_it}"),
        allow("--num-experts", not experts or args.moe_grouped_gemm,
              f"none without --moe-grouped-gemm {with_it}: experts are grouped"),
        allow("--num-experts", not experts or not args.add_bias_linear,
              f"none without --disable-bias-linear {with_it}"),
        allow("--moe-latent-size", args.moe_latent_size is None, f"none {with_it}"),
    ]  # fmt: skip
