"""Flags -> one frozen settings object for the program and one complete Megatron namespace a role.

megarl's own flags are the fields of `Settings`. All other flags are Megatron's, parsed by Megatron's parser; any of
them may carry a role prefix (`--critic-lr 1e-5`). `--config FILE.yaml …` holds the same names; a flag on the command
line wins. Nothing is accepted and ignored: what has no effect in a run is refused (`combinations`).
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable

from megarl import plugins
from megarl.algorithms.estimators import ESTIMATORS, Estimator, estimator_of
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, policy_loss_of
from megarl.errors import ArgumentParser, UsageError
from megarl.flags import combinations, config_files, role_flags
from megarl.flags.settings import MODELS, Settings
from megarl.rewards import expression

__all__ = ["MODELS", "Program", "RoleSettings", "Settings", "build_parser", "parse"]


@dataclasses.dataclass(frozen=True)
class RoleSettings:
    """One role: its world ranks, its complete, validated Megatron namespace, and what it has of megarl's own flags.

    `host` is the role whose model it runs: itself, or the actor for a rollout without a layout of its own. `has_model`:
    it runs one at all, which a reward role of verifiers alone does not.
    """

    name: str
    ranks: range
    megatron: argparse.Namespace
    max_tokens_per_microbatch: int
    tokenizer_type: str
    tokenizer_model: str | None
    chat_template: str | None
    offload: bool
    host: str
    has_model: bool

    @property
    def microbatch_multiple(self) -> int:
        """What Megatron's interleaved schedule wants the number of micro-batches to be a multiple of."""
        has_virtual_stages = self.megatron.virtual_pipeline_model_parallel_size is not None
        return self.megatron.pipeline_model_parallel_size if has_virtual_stages else 1


def _type_of(annotation):
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not type(None))
    return annotation


def _yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r}: allowed true or false")


def _own_flags(program: str) -> dict[str, dataclasses.Field]:
    """megarl's own flags of one program, without dashes in front: `gamma`, `critic-max-tokens-per-microbatch`."""
    roles, found = role_flags.ROLES_OF[program], {}
    for field in dataclasses.fields(Settings):
        if program in field.metadata["programs"]:
            name = field.name.replace("_", "-")
            found[name] = field
            found |= {f"{role}-{name}": field for role in field.metadata["roles"] if role in roles}
    return found


def _of_training(program: str) -> Callable[[str], bool]:
    """Which keys of a config file a program passes over: an evaluation takes the file of the run that it evaluates."""
    if program != "evaluate":
        return lambda key: False
    own, absent = _own_flags(program), set(role_flags.ROLES_OF["rl"]) - set(role_flags.ROLES_OF[program])
    from megarl.mcore import flags, supported

    others = (_own_flags(other) for other in ("rl", "sft", "reward"))
    names = {name for other in others for name in other} - set(own) | {"pretrained-checkpoint"}
    options = flags.destinations().items()
    names |= {option.removeprefix("--") for option, dest in options if dest in supported.training()}
    prefixes = tuple(f"{role}-" for role in absent)
    return lambda key: key in names or key.startswith(prefixes)


def build_parser(program: str) -> argparse.ArgumentParser:
    """The parser of megarl's own flags for one program ('rl', 'sft', 'reward' or 'evaluate')."""
    name = "megarl.evaluate" if program == "evaluate" else f"megarl.train_{program}"
    parser = ArgumentParser(prog=name, allow_abbrev=False, epilog=(
        "Every other flag is Megatron's; a role prefix (--actor-lr, --critic-lr) sets it for one role."))  # fmt: skip
    parser.add_argument("--config", nargs="+", action="extend", default=[], metavar="FILE", help=(
        "YAML files with the same names; later ones win, null takes a key back; the command line wins"))  # fmt: skip
    parser.add_argument("--check", action="store_true", help="check everything for WORLD_SIZE ranks, then leave")
    group = parser.add_argument_group("megarl")
    for name, field in _own_flags(program).items():
        kind, common = _type_of(field.type), field.name.replace("_", "-")
        extra = {"nargs": "?", "const": True, "type": _yes_or_no} if kind is bool else {"type": kind}
        text = field.metadata["help"] + ("" if field.default is None else f" (default {field.default})")
        if name != common:
            text = f"--{common} of this role"
        group.add_argument(f"--{name}", dest=name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **extra)
    return parser


def _check_values(chosen: dict, own: dict[str, dataclasses.Field]):
    for name, value in chosen.items():
        check = own[name].metadata["check"]
        if check is not None and not check(value):
            raise UsageError(f"--{name} {value}: allowed is {own[name].metadata['allowed']}")


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program was asked to do: settings, the roles of the run, and whether only to check.

    `estimator`, `policy_loss` and `rewards` are what `--advantage`, `--policy-loss` and `--reward` name.
    """

    settings: Settings
    roles: dict[str, RoleSettings]
    check: bool
    estimator: Estimator
    policy_loss: PolicyLoss
    rewards: tuple[expression.Term, ...]

    def with_models(self) -> list[RoleSettings]:
        """Roles that run a model of their own over packed text."""
        return [role for name, role in self.roles.items() if name in MODELS and role.has_model]


def parse(argv: list[str], world_size: int, program: str = "rl") -> Program:
    """Everything a program needs to know, from its command line alone. Raises UsageError before any work starts."""
    parser, own = build_parser(program), _own_flags(program)
    chosen, _ = parser.parse_known_args(argv)
    kinds = {name: _type_of(field.type) for name, field in own.items()}
    chosen, rest = parser.parse_known_args(config_files.read(chosen.config, kinds, _of_training(program)) + argv)
    values = {k: v for k, v in vars(chosen).items() if k not in ("config", "check")}
    _check_values(values, own)
    settings = Settings(**{own[k].name: v for k, v in values.items() if k == own[k].name.replace("_", "-")})
    case = _case(program, settings)
    absent = {r: combinations.reason(case, r) for r in role_flags.ROLES_OF[program] if r not in case.roles}
    ranks = role_flags.parse_role_map(settings.role_map, world_size, case.roles, absent)
    from megarl.mcore import flags, supported  # import Megatron: only once megarl's own flags are known to be right

    role_flags.check_learning(rest, program, flags.destinations(), supported.training())
    role_flags.check_reward(rest, program, "model" in case.rewards, flags.destinations())
    tokens = role_flags.split(rest, role_flags.ROLES_OF[program], flags.destinations(), [f"--{name}" for name in own])
    given = {f"--{name}": _condition(name, own[name]) for name in values}
    # Flags of a role that is not there have an effect where the condition called like the role holds.
    combinations.check(case, given | role_flags.with_prefix([*given, *rest], absent, flags.destinations()))
    roles = _role_settings(settings, values, tokens, ranks, case)
    return Program(settings, roles, chosen.check, case.estimator, case.policy_loss, case.terms)


def _condition(name: str, field: dataclasses.Field) -> str | None:
    """When a given flag has an effect; what has a value of the reward role's own is its model's."""
    return "model" if name.startswith("reward-") and "reward" in field.metadata["roles"] else field.metadata["when"]


def _case(program: str, settings: Settings) -> combinations.Case:
    estimator = _named("--advantage", settings.advantage, ESTIMATORS, estimator_of)
    policy_loss = _named("--policy-loss", settings.policy_loss, POLICY_LOSSES, policy_loss_of)
    has_reference = settings.kl_coefficient > 0 or "reference" in role_flags.named_roles(settings.role_map)
    roles = role_flags.roles_of(program, "values" in estimator.needs, has_reference)
    terms = expression.parse(settings.reward)
    return combinations.Case(program, settings, roles, estimator, policy_loss, terms)


def _named(flag: str, name: str, built_in: dict, wrap):
    """What is built in under a name, or the wrapped plug-in."""
    found = plugins.load(flag, name, built_in)
    try:
        return found if name in built_in else wrap(found)
    except ValueError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _role_settings(
    settings: Settings, values: dict, tokens: dict[str, list[str]], ranks: dict[str, range], case: combinations.Case
) -> dict[str, RoleSettings]:
    from megarl.mcore import flags

    longest = settings.max_prompt_length + settings.max_response_length
    own = {"train_iters": settings.train_iters, "seed": settings.seed}
    lengths = {role: longest for role in ranks} | {"reward": settings.reward_max_length or longest}
    extra = frozenset({"global_batch_size"}) if case.program in ("sft", "reward") else frozenset()
    found = {
        role: flags.parse(role, tokens[role], len(span), own | {"seq_length": lengths[role]}, extra)
        for role, span in ranks.items()
    }
    judges = combinations.CONDITIONS["model"].holds(case)
    chosen = {role: _own_of_role(role, settings, values) for role in ranks}
    for role in (name for name in ranks if name in MODELS and chosen[name]["offload"]):
        if found[role].use_torch_fsdp2:
            raise UsageError(f"--{role}-offload: not with --use-torch-fsdp2: sharded parameters stay where they are")
    hosts = {role: role for role in ranks}
    if "rollout" in ranks and ranks["rollout"] == ranks["actor"]:
        hosts["rollout"] = "actor" if role_flags.runs_on(found["actor"], found["rollout"]) else "rollout"
    return {
        role: RoleSettings(role, span, found[role], host=hosts[role], has_model=role != "reward" or judges,
                           **chosen[role])
        for role, span in ranks.items()
    }  # fmt: skip


def _own_of_role(role: str, settings: Settings, values: dict) -> dict:
    """megarl's own flags that roles have values of their own for: this role's, or the common ones."""
    fields = [field for field in dataclasses.fields(Settings) if field.metadata["roles"]]
    return {f.name: values.get(f"{role}-{f.name.replace('_', '-')}", getattr(settings, f.name)) for f in fields}


def check_microbatches(program: Program):
    """UsageError unless each role's micro-batches hold its longest text; in training of a reward model, two of them."""
    texts = 2 if list(program.roles) == ["reward"] else 1
    for role in program.with_models():
        cap, longest = role.max_tokens_per_microbatch, role.megatron.seq_length
        if cap < texts * longest:
            prefix = "" if cap == program.settings.max_tokens_per_microbatch else f"{role.name}-"
            limit = "--reward-max-length" if longest == program.settings.reward_max_length else (
                "--max-prompt-length + --max-response-length")  # fmt: skip
            raise UsageError(
                f"--{prefix}max-tokens-per-microbatch {cap}: must hold {('one sequence', 'a pair')[texts - 1]} of "
                f"{limit} = {longest} tokens" + " each" * (texts - 1)
            )
