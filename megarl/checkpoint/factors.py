"""Checkpoints of low-rank factors: which factors and which weights under them, and a check that both are the run's."""

from pathlib import Path
from typing import NamedTuple

from megarl.arguments import RoleSettings
from megarl.checkpoint import folders
from megarl.errors import UsageError
from megarl.mcore.lora.targets import LoRASettings, factor_shapes
from megarl.mcore.model.weight_table import weight_shapes

ENTRY = "lora"  # of the manifest: for each role with factors their settings, and where the weights under them come from


class BaseSource(NamedTuple):
    """Where the weights under a role's factors come from: a checkpoint, a Hugging Face folder, or the seed."""

    pretrained_checkpoint: str | None
    hf_model: str | None
    seed: int


class StoredFactors(NamedTuple):
    """What a manifest says about a role's factors."""

    lora: LoRASettings
    base: BaseSource


def manifest_entry(roles: dict[str, RoleSettings]) -> dict:
    """The manifest's entry about all roles with factors; {} if there are none."""
    found = {}
    for role in (role for role in roles.values() if role.lora and role.name != "rollout"):
        checkpoint, hf_model = role.megatron.pretrained_checkpoint, role.hf_model
        if checkpoint:
            checkpoint = str(folders.find(checkpoint, "--pretrained-checkpoint").resolve())
        base = BaseSource(checkpoint, str(hf_model.folder.path.resolve()) if hf_model else None, role.megatron.seed)
        found[role.name] = {"factors": role.lora.values(), "base": base._asdict()}
    return {ENTRY: found} if found else {}


def stored_factors(folder: Path, flag: str, role: str) -> StoredFactors | None:
    """What a checkpoint says about a role's factors; None: it holds all weights of the role."""
    entry = folders.read_manifest(folder, flag).get(ENTRY, {}).get(role)
    if entry is None:
        return None
    try:
        return StoredFactors(LoRASettings.from_values(entry["factors"]), BaseSource(**entry["base"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{flag} {folder}: manifest.json is damaged ({ENTRY}: {error!r})") from None


def check_factors(path: str, roles: list[RoleSettings]):
    """UsageError unless a checkpoint to resume from has exactly the factors that the roles' flags describe."""
    folder = folders.find(path, "--load")
    for role in roles:
        stored, given = stored_factors(folder, "--load", role.name), role.lora
        if bool(stored) != bool(given):
            has, said = ("low-rank factors", "no --lora-rank") if stored else ("no low-rank factors", "--lora-rank")
            raise UsageError(f"--load {path}: has {has} of the {role.name}, whose flags give {said}")
        for name, value in stored.lora.values().items() if stored else ():
            if (now := given.values()[name]) != value:
                raise UsageError(
                    f"--load {path}: the factors of the {role.name} have {name} {value}; the flags give {now}"
                )


def checkpoint_shapes(source: str, args, lora: LoRASettings, value_head: bool) -> dict[str, tuple[int, ...]]:
    """Global shapes by key that a role's factors, and its scalar head if it has one, must have in a checkpoint."""
    shapes = factor_shapes(args, lora) | ({"output_layer.weight": (1, args.hidden_size)} if value_head else {})
    return {f"{source}.{key}": shape for key, shape in shapes.items()}


def resume_shapes(role: RoleSettings, vocab_size: int, value_head: bool = False) -> dict[str, tuple[int, ...] | None]:
    """Global shapes that a role's checkpoint must have to resume, as for `folders.check_weights`."""
    if role.lora:
        return checkpoint_shapes(role.name, role.megatron, role.lora, value_head)
    return weight_shapes(role.name, role.megatron, vocab_size, resumes=True, value_head=value_head)
