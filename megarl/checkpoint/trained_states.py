"""Which optimizer states a checkpoint has, and of which parameters: a run that needs others cannot resume from it."""

from megarl.arguments import RunConfig
from megarl.errors import UsageError, flag_of

ENTRY = "optimizers"  # the manifest's entry: role -> its `flags_of_states`
_KINDS = ("bf16", "fp16", "use_distributed_optimizer", "use_torch_fsdp2")
_DEFAULTS = {"optimizer": "adam", "freeze": []}  # of checkpoints of versions without the entry


def flags_of_states(args) -> dict[str, object]:
    """The flags of a role that decide which states its optimizer has, by name in Megatron's namespace."""
    found: dict[str, object] = {"optimizer": args.optimizer, "freeze": sorted(args.freeze or [])}
    if args.optimizer == "sgd":
        found["sgd_momentum"] = "above 0" if args.sgd_momentum else "0"
    if args.freeze:  # other kinds name the fp32 weights of whole stacks of layers
        found |= {name: getattr(args, name) for name in _KINDS}
    return found


def manifest_entry(config: RunConfig) -> dict:
    """The entry of a checkpoint's manifest about the optimizers of the trained roles."""
    return {ENTRY: {name: flags_of_states(config.roles[name].megatron) for name in config.trained}}


def check(manifest: dict, config: RunConfig):
    """UsageError for a role with another optimizer, or other frozen parameters, than in the checkpoint of `--load`."""
    for role in map(config.roles.__getitem__, config.trained):
        found = flags_of_states(role.megatron)
        saved = _DEFAULTS | manifest.get(ENTRY, {}).get(role.name, {})
        for name in (name for name in found if found[name] != saved.get(name, found[name])):
            flag = flag_of(name)
            raise UsageError(
                f"{flag} {_text(getattr(role.megatron, name))}: the {role.name} in the checkpoint of --load "
                f"{config.settings.load} has optimizer states of {flag} {_text(saved[name])}; --pretrained-checkpoint "
                "starts a new run from its weights"
            )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) and value else str(value or "(none)")
