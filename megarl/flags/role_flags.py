"""Flags and ranks of each role: role maps, role prefixes, what the rollout inherits from the actor, models by folder.

The rollout generates with the actor's policy. It inherits the actor's flags except those of training, and may have its
own ranks and model-parallel sizes.
"""

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from megarl.errors import UsageError
from megarl.flags.distillation import TEACHERS_FLAG

if TYPE_CHECKING:
    from megarl.mcore.any_model.module_map import AnyModel
    from megarl.mcore.weights.hf.hf_model import HFModel

ROLES = ("actor", "critic", "reward", "reference", "teacher", "rollout")
OFF = "--off:"  # prefix of a switch that a config file turns off (`--no-…` is set) or unsets; its name is checked

PIPELINE_LAYOUT = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# Flags that may have a --rollout- prefix: they split the policy's weights. All others are the actor's.
ROLLOUT_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", *PIPELINE_LAYOUT,
)  # fmt: skip
PARALLEL_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
)  # fmt: skip
TRAINING_ONLY = (
    "context_parallel_size", "sequence_parallel", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_vp_stage", "use_torch_fsdp2",
    "use_distributed_optimizer", "overlap_grad_reduce",
)  # fmt: skip

_INTERVAL = re.compile(r"(?P<nodes>nodes?\s+)?(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")

# Roles that each program may have.
ROLES_OF = {"rl": ROLES, "sft": ("actor", "teacher"), "reward": ("reward",), "preference": ("actor",),
            "evaluate": ("actor", "reward", "rollout"), "serve": ("actor", "rollout")}  # fmt: skip
TRAINED_ROLES = {"rl": ("actor", "critic"), "sft": ("actor",), "reward": ("reward",), "preference": ("actor",),
                 "evaluate": (), "serve": ()}  # fmt: skip


def roles_of(program: str, has_critic: bool, has_reference: bool, has_teacher: bool) -> tuple[str, ...]:
    """Roles of a run, in the order of `ROLES`."""
    absent = {"critic": not has_critic, "reference": not has_reference, "teacher": not has_teacher}
    return tuple(role for role in ROLES_OF[program] if not absent.get(role))


def named_roles(text: str | None) -> set[str]:
    """Roles that a role map names, valid or not."""
    return {entry.partition("=")[0].strip() for entry in (text or "").split(";")}


def parse_role_map(
    text: str | None,
    world_size: int,
    roles: tuple[str, ...],
    absent: dict[str, str] | None = None,
    ranks_per_node: int | None = None,
) -> dict[str, range]:
    """`actor=0-3;critic=4-5;reward=6;reference=7` -> ranks of each role; None: every role on every rank.

    `actor=nodes 0-1;critic=node 2` are all ranks of these nodes. A rollout that is left out runs on the actor's ranks.

    Args:
        roles: of the run; each of them needs ranks.
        absent: roles of the program that this run does not have -> the reason.
        ranks_per_node: None: all ranks are on one node.

    Raises:
        UsageError: a missing, unknown, absent or repeated role, a malformed range, or a rank outside the world.
    """
    if text is None:
        return {role: range(world_size) for role in roles}
    found = {}
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        role, _, interval = entry.partition("=")
        ranks = _ranks_of(text, entry, interval, world_size, ranks_per_node or world_size)
        if absent and role in absent:
            raise UsageError(f"--role-map {text!r}: {role!r} has nothing to do: {absent[role]}; leave it out")
        if role not in roles or role in found:
            problem = "appears twice" if role in found else f"is no role; allowed: {', '.join(roles)}"
            raise UsageError(f"--role-map {text!r}: {role!r} {problem}")
        found[role] = ranks
        if ranks.stop > world_size:
            raise UsageError(f"--role-map {text!r}: rank {ranks.stop - 1} of {role} is outside the world; "
                             f"allowed 0-{world_size - 1} (world size {world_size})")  # fmt: skip
    missing = [role for role in roles if role not in found and role != "rollout"]
    if missing:
        raise UsageError(f"--role-map {text!r}: no ranks for {', '.join(missing)}; each role needs some")
    if "rollout" in roles:
        found.setdefault("rollout", found["actor"])
    return found


def _ranks_of(text: str, entry: str, interval: str, world_size: int, ranks_per_node: int) -> range:
    """The ranks of one entry of a role map; it may end outside the world."""
    match = _INTERVAL.fullmatch(interval)
    if match is None or int(match["last"] or match["first"]) < int(match["first"]):
        allowed = "role=first-last, role=rank, role=nodes first-last or role=node number"
        raise UsageError(f"--role-map {text!r}: {entry!r} is not of the form {allowed}")
    unit = 1
    if match["nodes"]:
        unit, nodes = ranks_per_node, world_size // ranks_per_node
        if world_size % ranks_per_node:
            raise UsageError(
                f"--role-map {text!r}: {world_size} ranks are no whole number of nodes with {ranks_per_node} ranks each"
            )
        if int(match["last"] or match["first"]) >= nodes:
            raise UsageError(
                f"--role-map {text!r}: {entry!r} is outside the world; allowed are nodes 0-{nodes - 1} "
                f"({ranks_per_node} ranks each)"
            )
    return range(unit * int(match["first"]), unit * (int(match["last"] or match["first"]) + 1))


def _option(token: str) -> str:
    """The flag of a token, without a value that follows `=`."""
    return token.split("=", 1)[0]


def _divided(option: str, roles, megatron: dict[str, str]) -> tuple[str | None, str]:
    """(role whose prefix an option has, its name without that); None for a common flag of Megatron, whose own name may
    start like a prefix."""
    role = next((role for role in roles if option.startswith(f"--{role}-") and option not in megatron), None)
    return role, option if role is None else "--" + option.removeprefix(f"--{role}-")


def with_prefix(tokens: list[str], roles, megatron: dict[str, str]) -> dict[str, str]:
    """The options among the tokens that have the prefix of one of these roles -> the role."""
    options = map(_option, tokens)
    return {option: role for option in options if (role := _divided(option, roles, megatron)[0])}


def attributes_set(tokens: list[str], roles, megatron: dict[str, str]) -> list[str]:
    """The attributes that Megatron's tokens set, sorted, with the role's prefix if they have one: `lr`, `critic_lr`."""
    found = set()
    for option in (_option(token).replace(OFF, "--") for token in tokens):
        role, name = _divided(option, roles, megatron)
        if name in megatron:
            found.add(f"{role}_{megatron[name]}" if role else megatron[name])
    return sorted(found)


def check_trained_roles(tokens: list[str], program: str, megatron: dict[str, str], training: frozenset[str]):
    """UsageError for a training flag, whose attribute is in `training`, of a role or program that is not trained."""
    for option in map(_option, tokens):
        role, name = _divided(option, ROLES_OF[program], megatron)
        # `split` checks the rollout's flags.
        is_trained = role in (*TRAINED_ROLES[program], "rollout") if role else bool(TRAINED_ROLES[program])
        if megatron.get(name) in training and not is_trained:
            problem = f"the {role} is not trained" if role else "this program does not train"
            raise UsageError(f"{option}: {problem}; leave it out")


def reward_model_options(tokens: list[str], program: str, megatron: dict[str, str]) -> list[str]:
    """The options among the tokens that only the model of the reward role reads; not parallel sizes, which define the
    replicas that verifiers use, too. UsageError for --reward-pretrained-checkpoint."""
    options = [] if program == "reward" else with_prefix(tokens, ("reward",), megatron)
    names = {option: megatron.get(_divided(option, ("reward",), megatron)[1]) for option in options}
    for option in (option for option, name in names.items() if name == "pretrained_checkpoint"):
        raise UsageError(f"{option}: its weights come from --reward-model, a judge's from --judge-load; leave it out")
    return [option for option, name in names.items() if name is not None and name not in PARALLEL_SIZES]


def split(
    tokens: list[str], roles: tuple[str, ...], megatron: dict[str, str], unknown: Callable[[str, str], UsageError],
    idle: Collection[str] = (),
) -> dict[str, list[str]]:  # fmt: skip
    """Megatron's tokens of each role: the common ones, then those with the role's prefix, which is removed.

    Args:
        megatron: Megatron's option strings -> the attribute that each one sets.
        unknown: makes the error of an unknown option, from it and from its name without a role's prefix.
        idle: options to drop with their values.

    Raises:
        UsageError: an unknown option, or one that may not have the rollout's prefix.
    """
    common, prefixed = [], {role: [] for role in roles}
    target = None  # the list of the flag that the next values belong to
    for token in tokens:
        off, is_false = token.startswith(OFF), token.endswith("=false")
        token = "--" + token.removeprefix(OFF).removesuffix("=false") if off else token
        option = _option(token)
        if option.startswith("--"):
            role, name = _divided(option, roles, megatron)
            target, token = common if role is None else prefixed[role], name + token.removeprefix(option)
            if name not in megatron:
                raise unknown(option, name)
            if role == "rollout":
                _check_rollout(option, name, megatron)
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


def _check_rollout(option: str, name: str, megatron: dict[str, str]):
    if megatron[name] not in ROLLOUT_LAYOUT:
        allowed = ", ".join("--rollout-" + dest.replace("_", "-") for dest in ROLLOUT_LAYOUT)
        raise UsageError(f"{option}: the rollout runs the actor's model; allowed with this prefix are {allowed}")


def _inherited(actor: list[str], own: list[str], megatron: dict[str, str]) -> list[str]:
    """The actor's tokens without the flags, and their values, that the rollout does not inherit."""
    dropped = set(TRAINING_ONLY)
    if any(megatron.get(_option(token)) == "pipeline_model_parallel_size" for token in own):
        dropped |= set(PIPELINE_LAYOUT)  # they fit only the actor's number of stages
    kept, keeps = [], True
    for token in actor:
        if token.startswith("--"):
            keeps = megatron[_option(token)] not in dropped
        if keeps:
            kept.append(token)
    return kept


def can_share_model(actor, rollout) -> bool:
    """Whether the rollout can generate with the actor's training module on the same ranks; both Megatron namespaces."""
    same = all(getattr(actor, name) == getattr(rollout, name) for name in ROLLOUT_LAYOUT)
    return same and actor.virtual_pipeline_model_parallel_size is None and not actor.use_torch_fsdp2


def read_hf_models(
    program: str, settings, own: dict[str, dict], lengths: dict[str, int]
) -> "dict[str, HFModel | AnyModel | None]":
    """The folder of each role, read and checked; None for a role without one. UsageError for a wrong one.

    The rollout has the actor's. `--hf-model` does not give the reward model's weights, but it describes the role like
    any common flag.

    Args:
        own: role -> its values of megarl's own flags.
        lengths: role -> its longest sequence, in tokens.
    """
    paths = {role: values["hf_model"] for role, values in own.items()}
    if "rollout" in paths:
        paths["rollout"] = paths["actor"]
    flags = {role: "--hf-model" if path == settings.hf_model else f"--{role}-hf-model" for role, path in paths.items()}
    if settings.teachers is not None:
        flags["teacher"] = TEACHERS_FLAG
    if "reward" in paths and program != "reward" and settings.reward_hf_model:
        paths["reward"], flags["reward"] = settings.reward_hf_model, "--reward-hf-model"
    if settings.judge_hf_model:
        paths["reward"], flags["reward"] = settings.judge_hf_model, "--judge-hf-model"
    sources = {role: own["actor" if role == "rollout" else role]["model_source"] for role in paths}
    for role, path in paths.items():
        if sources[role] == "transformers" and path is None and (role != "reward" or program == "reward"):
            prefix = "" if settings.model_source == "transformers" else f"{role}-"
            raise UsageError(f"--{prefix}model-source transformers: needs --{prefix}hf-model, whose model it computes")
    keys = {role: (sources[role], path, flags[role], lengths[role]) for role, path in paths.items()}
    read = {key: _read_model(settings, *key) for key in dict.fromkeys(keys.values()) if key[1] is not None}
    return {role: read.get(key) for role, key in keys.items()}


def _read_model(settings, source: str, path: str, flag: str, longest: int) -> "HFModel | AnyModel":
    if source == "transformers":
        from megarl.mcore.any_model import module_map  # needs transformers

        return module_map.read_model(path, flag, longest)
    from megarl.mcore.weights.hf.hf_model import read_model  # imports Megatron

    return read_model(path, flag, longest, settings.hf_mtp == "keep", settings.mtp_train)


def with_hf_defaults(role: str, own: dict, values: dict[str, object], hf_model: "HFModel | AnyModel | None") -> dict:
    """A role's values of megarl's own flags; without flags for the tokenizer, it is the folder's.

    Args:
        values: the flags that the user gave, by name.
    """
    given = {"tokenizer-type", "tokenizer-model", f"{role}-tokenizer-type", f"{role}-tokenizer-model"}
    prefixes = f"--{role}-", *{"reward": ("--judge-",), "teacher": (TEACHERS_FLAG,)}.get(role, ())
    has_own_folder = hf_model is not None and hf_model.folder.flag.startswith(prefixes)
    if has_own_folder:  # its tokenizer comes before that of the common flags
        given -= {"tokenizer-type", "tokenizer-model"}
    if hf_model is None or given & values.keys():
        return own
    return own | {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(hf_model.folder.path)}


def check_models(settings, offloads: dict[str, bool], megatron: dict, lora: dict, hf_models: dict):
    """UsageError for models that a run's settings do not allow; all by role, `offloads` of those with a model."""
    from megarl.mcore.config import kernel_rules, model_flags, recurrent_rules  # they import Megatron
    from megarl.mcore.model.pipeline_layout import check_shared_choices

    for role, args in megatron.items():
        check_shared_choices(role, args)
    kernel_rules.check_run(settings, hf_models)
    kernel_rules.check_lora(megatron, lora)
    recurrent_rules.check_run(settings, megatron)
    model_flags.check_prediction(settings, megatron, lora, hf_models)
    for role, is_offloaded in offloads.items():
        if is_offloaded and megatron[role].use_torch_fsdp2:
            raise UsageError(
                f"--{role}-offload: not allowed with --use-torch-fsdp2, whose sharded parameters cannot move"
            )


def longest_sequence(settings, role: str, is_judge: bool) -> int:
    """Tokens of the longest sequence that a role reads. `is_judge`: the reward role's model is a judge."""
    own = settings.max_prompt_length + settings.max_response_length
    if role == "reward":
        return settings.judge_max_length if is_judge else settings.reward_max_length or own
    prompt = settings.teacher_max_prompt_length if role == "teacher" else None
    return max(own, (prompt or 0) + settings.max_response_length)


def length_flags(settings, role: str) -> str:
    """The flags that set a `longest_sequence` which is not that of the policy."""
    if role == "reward":
        return "--judge-max-length" if settings.judge_config else "--reward-max-length"
    return "--teacher-max-prompt-length + --max-response-length"


def check_microbatches(config, sequences: int = 1):
    """UsageError unless each role's micro-batches hold an example: its longest sequence, or a pair of them.

    `config`: a `RunConfig`.
    """
    for role in (role for role in config.with_models() if not role.is_judge):
        cap, max_length = role.max_tokens_per_microbatch, role.megatron.seq_length
        if cap < sequences * max_length:
            prefix = "" if cap == config.settings.max_tokens_per_microbatch else f"{role.name}-"
            limit = role.megatron.length_flags
            needed, each = ("one sequence", "") if sequences == 1 else ("a pair", " each")
            raise UsageError(
                f"--{prefix}max-tokens-per-microbatch {cap}: must hold {needed} of {limit} = {max_length} tokens{each}"
            )
