"""The low-rank factors of each role, by megarl's own flags."""

import types

from megarl.errors import UsageError
from megarl.lora import ALL_LINEAR, ATTENTION_TARGETS, LoRASettings, parse_targets

FLAGS = ("lora_rank", "lora_alpha", "lora_rslora", "lora_targets")


def lora_of_roles(chosen: dict[str, dict], megatron: dict, trained: tuple[str, ...]) -> dict[str, LoRASettings | None]:
    """The factors of each role; None for a role that trains all of its weights, or none.

    Args:
        chosen: role -> its values of megarl's own flags; those of LoRA are removed.
        megatron: role -> its Megatron namespace.
        trained: roles of the program that are trained.

    Raises:
        UsageError: factors that the role's model cannot have, or a flag that needs another one.
    """
    found, given = {}, {}
    for role, own in chosen.items():
        role_settings = types.SimpleNamespace(**{name: own.pop(name) for name in FLAGS})
        found[role] = None
        if role in trained:
            given |= {"--" + name.replace("_", "-"): value for name, value in vars(role_settings).items() if value}
            found[role] = _settings_of(role, role_settings, megatron[role])
    idle = [flag for flag in given if flag != "--lora-rank"]
    if idle and not any(found.values()):
        raise UsageError(f"{idle[0]} {given[idle[0]]}: needs --lora-rank")
    return found


def _settings_of(role: str, role_settings, args) -> LoRASettings | None:
    rank, alpha, text = role_settings.lora_rank, role_settings.lora_alpha, role_settings.lora_targets
    if rank is None:
        return None
    if args.use_torch_fsdp2:
        raise UsageError(f"--lora-rank {rank}: not allowed with --use-torch-fsdp2; use --use-distributed-optimizer")
    targets = parse_targets(text or ALL_LINEAR)
    if not args.swiglu and text not in (None, ALL_LINEAR) and "gate_proj" in targets:
        raise UsageError(f"--lora-targets {text}: the {role} has no gate_proj, which needs --swiglu")
    if not args.swiglu:
        targets = tuple(name for name in targets if name != "gate_proj")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    size = args.tensor_model_parallel_size
    if set(targets) & set(ATTENTION_TARGETS[:3]) and groups % size:
        raise UsageError(
            f"--lora-targets {','.join(targets)}: the {role}'s {groups} key and value heads are split over "
            f"--tensor-model-parallel-size {size} ranks; allowed are divisors of {groups}, or targets without "
            "q_proj, k_proj and v_proj"
        )
    return LoRASettings(rank, float(rank if alpha is None else alpha), role_settings.lora_rslora, targets)
