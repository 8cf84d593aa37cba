"""Flags -> one frozen settings object for the program and one complete Megatron namespace per role.

megarl's own flags are the fields of `Settings` and the options of the policy losses. All other flags are Megatron's,
parsed by Megatron's parser; any of them may have a role prefix (`--critic-lr 1e-5`). `--config FILE.yaml …` uses the
same names; a flag on the command line wins. Unknown flags and wrong values are errors. A flag that has no effect with
the others is dropped with a warning (`flags.settings`).
"""

import argparse
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from megarl.algorithms import PREFERENCE_LOSSES
from megarl.algorithms.estimators import Estimator
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.errors import UsageError
from megarl.flags import command_line, parser, role_flags
from megarl.flags.command_line import CommandLine, named_estimator, named_policy_loss, read
from megarl.flags.conditions import OF_ROLES, SCORING_MODEL, FlagContext
from megarl.flags.distillation import (
    NONE,
    TeacherFolder,
    TeacherModels,
    check_teacher_flags,
    teacher_models,
    with_defaults_of_distillation,
)
from megarl.flags.environment import SESSIONS
from megarl.flags.fields import GENERATING, SUPERVISED
from megarl.flags.learning import MODELS, lora_of_roles
from megarl.flags.parser import build_parser, megatron_options
from megarl.flags.rewards import JUDGED, check_judge
from megarl.flags.settings import Settings, cautions, check_rules, warning, without_effect
from megarl.rewards import expression

if TYPE_CHECKING:
    from megarl.mcore.any_model.module_map import AnyModel
    from megarl.mcore.lora.targets import LoRASettings
    from megarl.mcore.weights.hf.hf_model import HFModel

# Fields of `RoleSettings` that are values of megarl's own flags.
OWN_FIELDS = (
    "max_tokens_per_microbatch", "tokenizer_type", "tokenizer_model", "chat_template", "chat_template_kwargs",
    "chat_template_date", "bos", "offload", "lora_adapter",
)  # fmt: skip
__all__ = ["MODELS", "RoleSettings", "RunConfig", "Settings", "build_parser", "parse"]


@dataclasses.dataclass(frozen=True)
class RoleSettings:
    """One role: its world ranks, its complete, validated Megatron namespace, and its values of megarl's own flags.

    `model_role` is the role whose model it runs: itself, or the actor for a rollout that shares the actor's layout.
    `has_model` is False for a reward role with verifiers only; `is_judge`: it is a judge, which generates, not a reward
    model, which has a scalar head. `hf_model`: the Hugging Face folder that describes the
    model; None: the flags do. `lora`: the factors that it trains instead of its weights; a rollout has the actor's.
    `lora_adapter`: the PEFT adapter that they start from. `run_folder`: of the run of megarl whose policy's weights it
    has, for one of several teachers.
    """

    name: str
    ranks: range
    megatron: argparse.Namespace
    max_tokens_per_microbatch: int
    tokenizer_type: str
    tokenizer_model: str | None
    chat_template: str | None
    chat_template_kwargs: str | None
    chat_template_date: str | None
    bos: str
    offload: bool
    model_role: str
    has_model: bool
    hf_model: "HFModel | AnyModel | None"
    lora: "LoRASettings | None"
    lora_adapter: str | None
    is_judge: bool = False
    run_folder: str | None = None

    @property
    def has_scalar_head(self) -> bool:
        """Whether its model has a scalar head, as those of critics and reward models."""
        return self.name == "critic" or self.name == "reward" and not self.is_judge

    def model_vocab_size(self, tokenizer_size: int) -> int:
        """Tokens that the model knows: its folder may have more than the tokenizer."""
        return self.hf_model.vocab_size if self.hf_model else tokenizer_size

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this, for Megatron's interleaved schedule."""
        has_virtual_stages = self.megatron.virtual_pipeline_model_parallel_size is not None
        return self.megatron.pipeline_model_parallel_size if has_virtual_stages else 1


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The parsed command line of a program: settings, roles, and whether only to check them.

    `estimator`, `policy_loss` (with its options) and `rewards` are those of `--advantage`, `--policy-loss` and
    `--reward`. `warnings`: lines for the user who starts the program. `trained`: names of the roles that are trained.
    `command_line`: the module and the arguments as they were typed. `user_settings`: sorted names of the settings that
    command line and config files set, of `megarl` and `megatron`; those of one role have its prefix. `teachers`: the
    models of the role teacher, whose settings in `roles` are those of the first.
    """

    settings: Settings
    roles: dict[str, RoleSettings]
    trained: tuple[str, ...]
    check: bool
    estimator: Estimator
    policy_loss: PolicyLoss
    rewards: tuple[expression.Term, ...]
    warnings: tuple[str, ...]
    command_line: tuple[str, ...]
    user_settings: dict[str, list[str]]
    teachers: TeacherModels

    def megarl_settings(self) -> dict[str, object]:
        """Values of megarl's own flags, including the policy loss's options, by name with underscores."""
        options = {flag.replace("-", "_"): value for flag, value in self.policy_loss.values().items()}
        return dataclasses.asdict(self.settings) | options

    def with_models(self) -> list[RoleSettings]:
        """Roles that run a model of their own, each teacher; a judge generates, the others read packed sequences."""
        roles = [role for name, role in self.roles.items() if name in MODELS and role.has_model]
        return [*roles, *self.teachers.models[1:]]


def parse(argv: list[str], world_size: int, program: str = "rl", ranks_per_node: int | None = None) -> RunConfig:
    """Parses and checks a command line. Raises UsageError before any work starts.

    For example `--advantage grpo --gamma 0.9 --num-layers 2 --critic-lr 1e-5 --actor-lr 1e-6` on one rank:

    1. The tokens are read: `advantage` and `gamma` are megarl's own flags, all others are Megatron's.
    2. GRPO needs no critic, so the run has the roles actor, reward, reference and rollout, each on rank 0.
    3. `--gamma` and `--critic-lr` have no effect: both are dropped, with one warning that says why.
    4. Megatron's parser gets `--num-layers 2 --lr 1e-6` for the actor, and `--num-layers 2` for reward and reference.
       The rollout has the tokens of the actor, whose model it runs.

    Args:
        ranks_per_node: for role maps of nodes; None: all ranks are on one node.
    """
    command = read(argv, program)
    parser.check_values(command.values, command.flags)
    context = _context(program, command.flags, command.values)

    absent = {r: OF_ROLES[r].why_not(context) or "" for r in role_flags.ROLES_OF[program] if r not in context.roles}
    ranks = role_flags.parse_role_map(context.settings.role_map, world_size, context.roles, absent, ranks_per_node)

    idle = _flags_without_effect(command, context, absent)
    megatron, roles_of = megatron_options().destinations, role_flags.ROLES_OF[program]
    unknown = functools.partial(parser.unknown_flag, command.flags, program)
    tokens = role_flags.split(command.others, roles_of, megatron, unknown, idle)
    attributes = role_flags.attributes_set(command.others, roles_of, megatron)
    values = _without(command.values, idle)
    context = _context(program, command.flags, values)
    check_rules(context)

    trained = () if context.settings.debug_rollout_only else role_flags.TRAINED_ROLES[program]
    given = *(f"--{name}" for name in values), *role_flags.with_prefix(command.others, ("teacher",), megatron)
    check_teacher_flags(context.settings.teachers, given, megatron)
    roles, teachers = _roles_and_teachers(context, values, tokens, ranks)
    folders = [role.hf_model for role in (*roles.values(), *teachers.models) if role.hf_model is not None]
    notes = dict.fromkeys(note for folder in folders for note in folder.notes)
    warnings = *warning(idle), *cautions(context), *notes
    return RunConfig(
        settings=context.settings, roles=roles, trained=tuple(role for role in trained if role in ranks),
        check=command.check, estimator=context.estimator, policy_loss=_with_options(context, values),
        rewards=context.terms, warnings=warnings,
        command_line=(f"megarl.{parser.MODULES[program]}", *argv),
        user_settings={"megarl": sorted(name.replace("-", "_") for name in command.values), "megatron": attributes},
        teachers=teachers,
    )  # fmt: skip


def with_sources(error: UsageError, argv: list[str], program: str) -> UsageError:
    """An error about a command line that also says which of the flags in its message come from config files."""
    defaults = {name: flag.default for name, flag in parser.own_flags(program).items()}
    return command_line.with_sources(error, argv, defaults)


def _context(program: str, flags: dict[str, parser.Flag], values: dict[str, object]) -> FlagContext:
    """The run that these values of megarl's own flags describe."""
    fields: dict[str, Any] = {flags[name].setting: value for name, value in values.items() if flags[name].setting}
    if fields.get("agent_sessions"):
        fields.setdefault("environment", SESSIONS)
    if fields.get("environment") is not None:
        fields.setdefault("reward", expression.ENVIRONMENT)
    if program == "rl" and fields.get("distill", NONE) != NONE:
        fields = with_defaults_of_distillation(fields)
    settings = Settings(**fields)
    estimator = named_estimator(settings.advantage)
    if program == "rl":
        expression.check_parts(settings, estimator.needs)
    trains = not settings.debug_rollout_only
    has_reference = settings.kl_coefficient > 0 or "reference" in role_flags.named_roles(settings.role_map)
    if "logprobs" in estimator.needs:
        has_reference |= PREFERENCE_LOSSES[settings.preference_loss].needs_reference
    return FlagContext(
        program=program,
        settings=settings,
        roles=role_flags.roles_of(
            program,
            trains and "values" in estimator.needs,
            trains and has_reference,
            trains and settings.distill != NONE,
        ),
        estimator=estimator,
        terms=expression.terms_of_run(settings) if program in GENERATING.split() else expression.parse(settings.reward),
        policy_loss=named_policy_loss(settings.policy_loss),
    )


def _flags_without_effect(command: CommandLine, context: FlagContext, absent: dict[str, str]) -> dict[str, str]:
    """The given flags without effect, each with the reason. UsageError for one that only training would read.

    `absent`: roles that the run does not have.
    """
    megatron = megatron_options().destinations
    role_flags.check_trained_roles(command.others, context.program, megatron, megatron_options().training)
    given = {f"--{name}": command.flags[name].condition for name in command.values}
    given |= dict.fromkeys(role_flags.reward_model_options(command.others, context.program, megatron), SCORING_MODEL)
    of_absent = role_flags.with_prefix([*given, *command.others], absent, megatron)
    given |= {option: OF_ROLES[role] for option, role in of_absent.items()}
    idle: dict[str, str] = {}
    while more := without_effect(context, given):
        idle |= more  # then without them others may have none
        given = {flag: when for flag, when in given.items() if flag not in more}
        context = _context(context.program, command.flags, _without(command.values, idle))
    return idle


def _without(values: dict[str, object], idle: dict[str, str]) -> dict[str, object]:
    """Values of megarl's own flags but for idle ones."""
    return {name: value for name, value in values.items() if f"--{name}" not in idle}


def _with_options(context: FlagContext, values: dict[str, object]) -> PolicyLoss:
    try:
        return context.policy_loss.with_options(values)
    except ValueError as error:
        raise UsageError(f"--policy-loss {context.settings.policy_loss}: {error}") from None


def _roles_and_teachers(
    context: FlagContext, values: dict[str, object], tokens: dict[str, list[str]], ranks: dict[str, range]
) -> tuple[dict[str, RoleSettings], TeacherModels]:
    """The settings of each role of `ranks`, and those of each teacher; arguments as of `_role_settings`."""
    text = context.settings.teachers if "teacher" in ranks else None
    if text is None:
        roles = _role_settings(context, values, tokens, ranks)
        return roles, TeacherModels(models=(roles["teacher"],) if "teacher" in roles else ())

    def build(folder: TeacherFolder) -> RoleSettings:
        own = values | {"teacher-hf-model": folder.hf_model}
        own |= {"teacher-model-source": folder.model_source} if folder.model_source else {}
        return _role_settings(context, own, tokens, {"teacher": ranks["teacher"]}, folder)["teacher"]

    roles = _role_settings(context, values, tokens, {role: own for role, own in ranks.items() if role != "teacher"})
    found = teacher_models(text, build)
    if found.take_turns:
        found = found._replace(models=tuple(dataclasses.replace(role, offload=True) for role in found.models))
    return {role: roles.get(role, found.models[0]) for role in ranks}, found


def _role_settings(
    context: FlagContext, values: dict[str, object], tokens: dict[str, list[str]],
    ranks: dict[str, range], folder: TeacherFolder | None = None,
) -> dict[str, RoleSettings]:  # fmt: skip
    """The settings of each role of `ranks`, from the values of megarl's own flags and Megatron's tokens.

    `folder`: of the only role, one of several teachers.
    """
    settings = context.settings
    is_judge = JUDGED.holds(context)
    lengths = {role: role_flags.longest_sequence(settings, role, is_judge) for role in ranks}
    by_role = [field.name for field in dataclasses.fields(Settings) if field.metadata["roles"]]
    own: dict[str, dict[str, Any]] = {
        role: {name: values.get(f"{role}-{name.replace('_', '-')}", getattr(settings, name)) for name in by_role}
        for role in ranks
    }
    hf_models = role_flags.read_hf_models(context.program, settings, own, lengths)
    megatron = {
        role: _megatron_namespace(context, role, tokens[role], len(ranks[role]), lengths[role], hf_models[role], folder)
        for role in ranks
    }
    own = {role: role_flags.with_hf_defaults(role, own[role], values, hf_models[role]) for role in ranks}
    lora = lora_of_roles(own, megatron, hf_models, role_flags.TRAINED_ROLES[context.program])
    offloads = {role: own[role]["offload"] for role in ranks if role in MODELS}
    role_flags.check_models(settings, offloads, megatron, lora, hf_models)
    if is_judge and "reward" in ranks:
        check_judge(megatron["reward"])
    if "rollout" in ranks:
        lora["rollout"] = lora["actor"]
    has_scoring_model = SCORING_MODEL.holds(context)
    return {
        role: RoleSettings(
            name=role,
            ranks=ranks[role],
            megatron=megatron[role],
            model_role=_model_role(role, ranks, megatron),
            has_model=role != "reward" or has_scoring_model,
            is_judge=role == "reward" and is_judge,
            hf_model=hf_models[role],
            lora=lora[role],
            run_folder=None if folder is None else folder.run,
            **{name: own[role][name] for name in OWN_FIELDS},
        )
        for role in ranks
    }


def _megatron_namespace(
    context: FlagContext, role: str, tokens: list[str], ranks: int, max_length: int,
    hf_model: "HFModel | AnyModel | None", teacher: TeacherFolder | None = None,
) -> argparse.Namespace:  # fmt: skip
    """A role's namespace of Megatron's parser; the flags that describe a folder's model come before its tokens."""
    from megarl.mcore.config import megatron_flags
    from megarl.mcore.weights.hf.hf_model import command_line as flag_tokens

    settings, is_judge = context.settings, role == "reward" and expression.JUDGE in context.rewards
    own: dict[str, Any] = {
        "train_iters": settings.train_iters,
        "seed": settings.seed,
        "seq_length": max_length,
        "draws_weights": hf_model is None,
        "model_folder": None if hf_model is None else hf_model.folder_of_module,
        "predicts": settings.predicts and role in ("actor", "rollout"),
        "trains_prediction": settings.mtp_train,
        "exact_rollout": settings.exact_rollout and (role in ("actor", "rollout") or is_judge),
    }
    if max_length != settings.max_prompt_length + settings.max_response_length:
        own["length_flags"] = role_flags.length_flags(settings, role)
    own |= {} if teacher is None else {"pretrained_checkpoint": None, **teacher.attributes}
    extra = frozenset({"global_batch_size"}) if context.program in SUPERVISED.split() else frozenset()
    if hf_model is None:
        return megatron_flags.parse(role, tokens, ranks, own, extra)
    described, folder = flag_tokens(hf_model.flags), f"{hf_model.folder.flag} {hf_model.folder.path}"
    is_module = hf_model.folder_of_module is not None
    tokens = megatron_flags.with_folder(role, described, folder, tokens, is_module)
    try:
        return megatron_flags.parse(role, tokens, ranks, own, extra)
    except UsageError as error:
        raise megatron_flags.with_source(error, described, folder) from None


def _model_role(role: str, ranks: dict[str, range], megatron: dict[str, argparse.Namespace]) -> str:
    """The role whose model a role runs: the actor's for a rollout on its ranks that can share it, else its own."""
    is_shared = (
        role == "rollout"
        and ranks["rollout"] == ranks["actor"]
        and role_flags.can_share_model(megatron["actor"], megatron["rollout"])
    )
    return "actor" if is_shared else role
