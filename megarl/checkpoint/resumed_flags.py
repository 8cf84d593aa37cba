"""Whether a run resumes with the schedules and the optimizer states of its checkpoint, and which schedule counts."""

from collections.abc import Iterator

from megarl.arguments import RoleSettings, RunConfig
from megarl.errors import UsageError, flag_of

SCHEDULES, OPTIMIZERS = "schedules", "optimizers"  # entries of the manifest: role -> `schedule_flags`, `state_flags`
_MULTIPLIERS = ("lr_multipliers", "weight_decay_multipliers")
_ALWAYS = (
    "lr", "decoupled_lr", "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init",
    "weight_decay_incr_style", *_MULTIPLIERS,
)  # fmt: skip
_OF_WEIGHT_DECAY = ("start_weight_decay", "end_weight_decay")  # --weight-decay if it is constant
_OF_A_DECAY = ("min_lr", "decoupled_min_lr", "lr_wsd_decay_iters", "lr_wsd_decay_style")
_KINDS = ("bf16", "fp16", "use_distributed_optimizer", "use_torch_fsdp2")


def schedule_flags(args) -> dict[str, object]:
    """The flags of a role that decide the learning rate and weight decay of each step, by name in Megatron's namespace.

    The steps of a decay count only if anything decays: a run with constant rates may become longer.
    """
    has_decay, is_constant = args.lr_decay_style != "constant", args.weight_decay_incr_style == "constant"
    names = (*_ALWAYS, *_OF_A_DECAY * has_decay, *(("weight_decay",) if is_constant else _OF_WEIGHT_DECAY))
    found = {name: getattr(args, name) for name in names}
    if has_decay or args.lr_warmup_fraction is not None or not is_constant:
        found["lr_decay_iters"] = args.lr_decay_iters or args.train_iters
    return found


def state_flags(args) -> dict[str, object]:
    """The flags of a role that decide which states its optimizer has, by name in Megatron's namespace."""
    found: dict[str, object] = {"optimizer": args.optimizer, "freeze": sorted(args.freeze or [])}
    if args.optimizer == "sgd":
        found["sgd_momentum"] = "above 0" if args.sgd_momentum else "0"
    if args.freeze:  # other kinds name the fp32 weights of whole stacks of layers
        found |= {name: getattr(args, name) for name in _KINDS}
    return found


def manifest_entries(config: RunConfig) -> dict:
    """The entries of a checkpoint's manifest about the schedules and the optimizers of the trained roles."""
    args = {name: config.roles[name].megatron for name in config.trained}
    return {
        SCHEDULES: {name: schedule_flags(of_role) for name, of_role in args.items()},
        OPTIMIZERS: {name: state_flags(of_role) for name, of_role in args.items()},
    }


def _other_schedules(manifest: dict, config: RunConfig) -> Iterator[tuple[RoleSettings, dict, str]]:
    """(role, its flags in the checkpoint, what differs) of each role whose schedule is not the checkpoint's."""
    for role in map(config.roles.__getitem__, config.trained):
        found = schedule_flags(role.megatron)
        saved = manifest[SCHEDULES].get(role.name, found)
        # A flag that only one of them has goes with the style of the decay, which then differs, too.
        changed = [name for name in found.keys() & saved.keys() if found[name] != saved[name]]
        if changed:
            yield role, saved, ", ".join(_change(name, saved[name], found[name]) for name in sorted(changed))


def _change(name: str, before: object, after: object) -> str:
    before, after = (" ".join(value) if isinstance(value, list) else value for value in (before, after))
    before, after = ("not set" if value is None else value for value in (before, after))
    return f"{flag_of(name)} {after} (before: {before})"


def check(manifest: dict, config: RunConfig):
    """UsageError for a role with another schedule than in the checkpoint of `--load`, unless a flag says which of them
    counts, and for one with another optimizer, or other frozen parameters."""
    path = config.settings.load
    for role, _, changes in _other_schedules(manifest, config):
        if not role.megatron.override_opt_param_scheduler and not role.megatron.use_checkpoint_opt_param_scheduler:
            raise UsageError(
                f"{changes}: not the schedule of the {role.name} in the checkpoint of --load {path}; "
                "--override-opt-param-scheduler takes the new one, --use-checkpoint-opt-param-scheduler the old one"
            )
    for role in map(config.roles.__getitem__, config.trained):
        found = state_flags(role.megatron)
        saved = manifest[OPTIMIZERS].get(role.name, found)
        for name in (name for name in found if found[name] != saved.get(name, found[name])):
            raise UsageError(
                f"{flag_of(name)} {_text(getattr(role.megatron, name))}: the {role.name} in the checkpoint of --load "
                f"{path} has optimizer states of {flag_of(name)} {_text(saved[name])}; --pretrained-checkpoint "
                "starts a new run from its weights"
            )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) and value else str(value or "(none)")


def adopt(manifest: dict, config: RunConfig) -> list[str]:
    """Gives roles with `--use-checkpoint-opt-param-scheduler` the schedule of the checkpoint, before models are built.

    Returns:
        A line for each role about the flags that do not count.
    """
    lines = []
    for role, saved, changes in _other_schedules(manifest, config):
        if role.megatron.use_checkpoint_opt_param_scheduler:
            vars(role.megatron).update(dict.fromkeys(_OF_WEIGHT_DECAY) | saved)
            lines.append(f"--use-checkpoint-opt-param-scheduler: the {role.name} does not use {changes}")
    return lines
