"""Which flags and which ranks belong to which role: role maps, role prefixes, and what the rollout takes over.

The rollout writes with the actor's policy: it inherits the actor's flags except those that only training has, and may
have ranks and model-parallel sizes of its own.
"""

import difflib
from collections.abc import Collection

from megarl.errors import UsageError

ROLES = ("actor", "critic", "reward", "reference", "rollout")
OFF = "--off:"  # marks a switch that a config file turns off or takes back: its name is checked, its opposite is set

# What a --rollout-… prefix may set: how the policy's weights are split. Everything else is the actor's.
ROLLOUT_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip
LANES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
)  # fmt: skip
TRAINING_ONLY = (
    "context_parallel_size", "sequence_parallel", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_vp_stage", "use_torch_fsdp2",
    "use_distributed_optimizer", "overlap_grad_reduce",
)  # fmt: skip
OF_A_PIPELINE = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
)  # fmt: skip


# Roles that each program may have.
ROLES_OF = {"rl": ROLES, "sft": ("actor",), "reward": ("reward",), "evaluate": ("actor", "reward", "rollout")}
LEARNING = {"rl": ("actor", "critic"), "sft": ("actor",), "reward": ("reward",), "evaluate": ()}  # those that learn


def roles_of(program: str, has_critic: bool, has_reference: bool) -> tuple[str, ...]:
    """Roles of one run of a program, in the order of `ROLES`."""
    absent = {"critic": not has_critic, "reference": not has_reference}
    return tuple(role for role in ROLES_OF[program] if not absent.get(role))


def named_roles(text: str | None) -> set[str]:
    """Roles that a role map speaks of, right or wrong."""
    return {part.partition("=")[0].strip() for part in (text or "").split(";")}


def parse_role_map(
    text: str | None, world_size: int, roles: tuple[str, ...], absent: dict[str, str] | None = None
) -> dict[str, range]:
    """`actor=0-3;critic=4-5;reward=6;reference=7` -> ranks of each role; None: every role on every rank.

    The rollout may be left out: it then runs on the actor's ranks.

    Args:
        roles: those of the run; each of them needs ranks.
        absent: roles that the program knows and this run has not, and why.

    Raises:
        UsageError: a missing, unknown, absent or repeated role, a malformed range, or a rank outside the world.
    """
    if text is None:
        return {role: range(world_size) for role in roles}
    found = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        role, _, span = part.partition("=")
        first, _, last = span.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise UsageError(f"--role-map {text!r}: {part!r} is not of the form role=first-last or role=rank")
        if role in (absent or {}):
            raise UsageError(f"--role-map {text!r}: {role!r} has nothing to do: {absent[role]}; leave it out")
        if role not in roles or role in found:
            problem = "stands twice" if role in found else f"is no role; allowed: {', '.join(roles)}"
            raise UsageError(f"--role-map {text!r}: {role!r} {problem}")
        found[role] = range(int(first), int(last or first) + 1)
        if found[role].stop > world_size:
            raise UsageError(f"--role-map {text!r}: rank {found[role].stop - 1} of {role} is outside the world; "
                             f"allowed 0-{world_size - 1} (world size {world_size})")  # fmt: skip
    missing = [role for role in roles if role not in found and role != "rollout"]
    if missing:
        raise UsageError(f"--role-map {text!r}: no ranks for {', '.join(missing)}; each role needs some")
    if "rollout" in roles:
        found.setdefault("rollout", found["actor"])
    return found


def _role_of(option: str, roles, megatron: dict[str, str]) -> str | None:
    """The role whose prefix an option carries; a flag of Megatron's that only looks like it carries none."""
    return next((role for role in roles if option.startswith(f"--{role}-") and option not in megatron), None)


def with_prefix(tokens: list[str], roles, megatron: dict[str, str]) -> dict[str, str]:
    """Options among the tokens that are for one of these roles alone -> the role."""
    options = (token.split("=", 1)[0] for token in tokens)
    return {option: role for option in options if (role := _role_of(option, roles, megatron))}


def check_learning(tokens: list[str], program: str, megatron: dict[str, str], training: frozenset[str]):
    """UsageError for a flag of training that is for nobody who learns.

    Args:
        megatron: as in `split`.
        training: attributes that training alone reads.
    """
    for option in (token.split("=", 1)[0] for token in tokens):
        role = _role_of(option, ROLES_OF[program], megatron)
        name = option if role is None else "--" + option[len(role) + 3 :]
        # What a rollout's prefix may set, `split` says.
        learns = role in (*LEARNING[program], "rollout") if role else bool(LEARNING[program])
        if megatron.get(name) in training and not learns:
            raise UsageError(f"{option}: {f'the {role}' if role else 'this program'} does not learn; leave it out")


def of_reward_model(tokens: list[str], program: str, megatron: dict[str, str]) -> list[str]:
    """Options among the tokens that the reward role's model alone reads; UsageError for weights from elsewhere.

    Its ranks and its data-parallel lanes, which follow from its parallel sizes, score text without a model, too.
    """
    options = [] if program == "reward" else with_prefix(tokens, ("reward",), megatron)
    names = {option: megatron.get("--" + option.removeprefix("--reward-")) for option in options}
    for option in (option for option, name in names.items() if name == "pretrained_checkpoint"):
        raise UsageError(f"{option}: the weights of the reward role's model come from --reward-model; leave it out")
    return [option for option, name in names.items() if name is not None and name not in LANES]


def split(
    tokens: list[str], roles: tuple[str, ...], megatron: dict[str, str], own: list[str], idle: Collection[str] = ()
) -> dict[str, list[str]]:
    """Megatron's tokens of each role: the common ones first, then those with the role's prefix, prefix removed.

    Args:
        megatron: Megatron's option strings and the attribute each one sets.
        own: megarl's option strings, for suggestions.
        idle: options to leave out, with their values.

    Raises:
        UsageError: an option that nobody knows, or one of the rollout's that is not its own to set.
    """
    common, prefixed, target = [], {role: [] for role in roles}, None
    for token in tokens:
        off, is_false = token.startswith(OFF), token.endswith("=false")
        token = "--" + token.removeprefix(OFF).removesuffix("=false") if off else token
        option = token.split("=", 1)[0]
        if option.startswith("--"):
            role = _role_of(option, roles, megatron)
            target = common if role is None else prefixed[role]
            token = token if role is None else "--" + token[len(role) + 3 :]
            _check_known(option, token.split("=", 1)[0], megatron, own)
            if role == "rollout":
                _check_rollout(option, token.split("=", 1)[0], megatron)
            if option in idle and not off:
                target = []
        elif target is None:
            raise UsageError(f"{token!r}: not a flag; flags start with --")
        opposite = "--no-" + token[2:]
        if not off:
            target.append(token)
        elif is_false and megatron[token] == megatron.get(opposite):
            target.append(opposite)
    found = {role: common + prefixed[role] for role in roles}
    if "rollout" in roles:
        found["rollout"] = _inherited(found["actor"], prefixed["rollout"], megatron) + prefixed["rollout"]
    return found


def _check_known(option: str, name: str, megatron: dict[str, str], own: list[str]):
    if name not in megatron:
        close = difflib.get_close_matches(option, [*megatron, *own], n=1)
        raise UsageError(f"{option}: unknown flag" + (f"; did you mean {close[0]}?" if close else ""))


def _check_rollout(option: str, name: str, megatron: dict[str, str]):
    if megatron[name] not in ROLLOUT_LAYOUT:
        allowed = ", ".join("--rollout-" + dest.replace("_", "-") for dest in ROLLOUT_LAYOUT)
        raise UsageError(f"{option}: the rollout runs the actor's model; allowed with this prefix are {allowed}")


def _inherited(actor: list[str], own: list[str], megatron: dict[str, str]) -> list[str]:
    """The actor's tokens without flags, values included, that the rollout does not take over."""
    dropped = set(TRAINING_ONLY)
    if any(megatron.get(token.split("=", 1)[0]) == "pipeline_model_parallel_size" for token in own):
        dropped |= set(OF_A_PIPELINE)  # they describe the actor's pipeline
    kept, keeps = [], True
    for token in actor:
        if token.startswith("--"):
            keeps = megatron[token.split("=", 1)[0]] not in dropped
        if keeps:
            kept.append(token)
    return kept


def runs_on(actor, rollout) -> bool:
    """Whether the module that trains (its Megatron namespace) can write on the same ranks for the rollout's."""
    same = all(getattr(actor, name) == getattr(rollout, name) for name in ROLLOUT_LAYOUT)
    return same and actor.virtual_pipeline_model_parallel_size is None and not actor.use_torch_fsdp2
