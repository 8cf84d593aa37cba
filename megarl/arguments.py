"""Flags -> one frozen settings object for the program and one complete Megatron namespace per role.

megarl's own flags are the fields of `Settings` and the options of the policy losses. All other flags are Megatron's,
parsed by Megatron's parser; any of them may have a role prefix (`--critic-lr 1e-5`). `--config FILE.yaml …` uses the
same names; a flag on the command line wins. Unknown flags and wrong values are errors. A flag that has no effect with
the others is dropped with a warning (`combinations`).
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl import plugins
from megarl.algorithms.estimators import ESTIMATORS, Estimator, estimator_of
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.policy_losses import POLICY_LOSSES, policy_loss_of
from megarl.errors import UsageError
from megarl.flags import combinations, config_files, parser, role_flags
from megarl.flags.hf_models import read_hf_models, with_hf_defaults
from megarl.flags.lora import lora_of_roles
from megarl.flags.parser import build_parser
from megarl.flags.settings import MODELS, Settings
from megarl.rewards import expression

if TYPE_CHECKING:
    from megarl.mcore.lora.settings import LoRASettings
    from megarl.mcore.weights.hf.hf_model import HFModel

__all__ = ["MODELS", "RoleSettings", "RunConfig", "Settings", "build_parser", "parse"]


@dataclasses.dataclass(frozen=True)
class RoleSettings:
    """One role: its world ranks, its complete, validated Megatron namespace, and its values of megarl's own flags.

    `model_role` is the role whose model it runs: itself, or the actor for a rollout that shares the actor's layout.
    `has_model` is False for a reward role with verifiers only. `hf_model`: the Hugging Face folder that describes the
    model; None: the flags do. `lora`: the factors that it trains instead of its weights; a rollout has the actor's.
    `lora_adapter`: the PEFT adapter that they start from.
    """

    name: str
    ranks: range
    megatron: argparse.Namespace
    max_tokens_per_microbatch: int
    tokenizer_type: str
    tokenizer_model: str | None
    chat_template: str | None
    offload: bool
    model_role: str
    has_model: bool
    hf_model: "HFModel | None"
    lora: "LoRASettings | None"
    lora_adapter: str | None

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
    `--reward`. `warnings`: lines for the user who starts the program.
    """

    settings: Settings
    roles: dict[str, RoleSettings]
    check: bool
    estimator: Estimator
    policy_loss: PolicyLoss
    rewards: tuple[expression.Term, ...]
    warnings: tuple[str, ...]

    def megarl_settings(self) -> dict[str, object]:
        """Values of megarl's own flags, including the policy loss's options, by name with underscores."""
        options = {flag.replace("-", "_"): value for flag, value in self.policy_loss.values().items()}
        return dataclasses.asdict(self.settings) | options

    def with_models(self) -> list[RoleSettings]:
        """Roles that run their own model over packed sequences."""
        return [role for name, role in self.roles.items() if name in MODELS and role.has_model]


def parse(argv: list[str], world_size: int, program: str = "rl", ranks_per_node: int | None = None) -> RunConfig:
    """Parses and checks a command line. Raises UsageError before any work starts.

    `ranks_per_node`: for role maps of nodes; None: all ranks are on one node.
    """
    chosen, rest, own = _read(argv, program)
    values = {name: value for name, value in vars(chosen).items() if name in own}
    parser.check_values(values, own)
    context = _context(program, _settings(values, own))
    absent = {r: combinations.reason(context, r) for r in role_flags.ROLES_OF[program] if r not in context.roles}
    ranks = role_flags.parse_role_map(context.settings.role_map, world_size, context.roles, absent, ranks_per_node)
    # These import Megatron, so they come after the check of megarl's own flags.
    from megarl.mcore.config import megatron_flags, supported_flags

    megatron = megatron_flags.destinations()
    role_flags.check_trained_roles(rest, program, megatron, supported_flags.training())
    given = {f"--{name}": own[name].condition for name in values}
    given |= dict.fromkeys(role_flags.reward_model_options(rest, program, megatron), "model")
    # For flags of an absent role, the condition has the role's name.
    idle = combinations.without_effect(context, given | role_flags.with_prefix([*given, *rest], absent, megatron))
    tokens = role_flags.split(rest, role_flags.ROLES_OF[program], megatron, [f"--{name}" for name in own], idle)
    values = {name: value for name, value in values.items() if f"--{name}" not in idle}
    context = _context(program, _settings(values, own))
    combinations.check(context)
    return RunConfig(
        settings=context.settings,
        roles=_role_settings(context.settings, values, tokens, ranks, context),
        check=chosen.check,
        estimator=context.estimator,
        policy_loss=_with_options(context, values),
        rewards=context.terms,
        warnings=(combinations.warning(idle),) if idle else (),
    )


def with_sources(error: UsageError, argv: list[str], program: str) -> UsageError:
    """An error about a command line that also says which of the flags in its message come from config files."""
    defaults = {name: flag.default for name, flag in parser.own_flags(program).items()}
    return config_files.with_sources(error, argv, defaults)


def _read(argv: list[str], program: str) -> tuple[argparse.Namespace, list[str], dict[str, parser.Flag]]:
    """(values of megarl's own flags, config files included; all other tokens; megarl's own flags by name)."""
    own = parser.own_flags(program)
    chosen, rest = _parse_own(argv, program, own)
    name = vars(chosen).get("policy-loss")
    if name is not None and name not in POLICY_LOSSES:  # a plug-in, which may define further flags
        own = parser.own_flags(program, _policy_loss(name))
        chosen, rest = _parse_own(argv, program, own)
    return chosen, rest, own


def _parse_own(argv: list[str], program: str, own: dict[str, parser.Flag]) -> tuple[argparse.Namespace, list[str]]:
    """argparse's `parse_known_args`, with the flags of the config files before those of the command line."""
    own_parser = parser.build_parser(program, own)
    files = config_files.read(own_parser.parse_known_args(argv)[0].config)
    is_other = _is_training_key(program, str(files.get("policy-loss", "")))
    kinds = {name: flag.kind for name, flag in own.items()}
    return own_parser.parse_known_args(config_files.tokens(files, kinds, is_other) + argv)


def _is_training_key(program: str, policy_loss: str) -> Callable[[str], bool]:
    """Whether a program ignores a key of a config file: evaluation and server accept the config file of a training run.

    `policy_loss`: that of the files; a plug-in's options are training flags, too.
    """
    if program not in ("evaluate", "serve"):
        return lambda key: False
    own, absent = parser.own_flags(program), set(role_flags.ROLES_OF["rl"]) - set(role_flags.ROLES_OF[program])
    from megarl.mcore.config import megatron_flags, supported_flags

    others = (parser.own_flags(other) for other in ("rl", "sft", "reward", "evaluate"))
    names = {name for other in others for name in other} - set(own) | {"pretrained-checkpoint"}
    options = megatron_flags.destinations().items()
    names |= {option.removeprefix("--") for option, dest in options if dest in supported_flags.training()}
    prefixes = [f"{role}-" for role in absent]
    if ":" in policy_loss:
        prefixes.append(policy_loss.rpartition(":")[2].replace("_", "-") + "-")
    return lambda key: key in names or key not in own and key.startswith(tuple(prefixes))


def _settings(values: dict[str, object], own: dict[str, parser.Flag]) -> Settings:
    fields: dict[str, Any] = {own[name].setting: value for name, value in values.items() if own[name].setting}
    if fields.get("environment") is not None:
        fields.setdefault("reward", expression.ENVIRONMENT)
    return Settings(**fields)


def _context(program: str, settings: Settings) -> combinations.FlagContext:
    estimator = _named("--advantage", settings.advantage, ESTIMATORS, estimator_of)
    trains = not settings.debug_rollout_only
    has_reference = settings.kl_coefficient > 0 or "reference" in role_flags.named_roles(settings.role_map)
    roles = role_flags.roles_of(program, trains and "values" in estimator.needs, trains and has_reference)
    terms = expression.parse(settings.reward)
    return combinations.FlagContext(program, settings, roles, estimator, _policy_loss(settings.policy_loss), terms)


def _named(flag: str, name: str, built_in: dict, wrap):
    """The built-in object of that name, or the wrapped plug-in."""
    found = plugins.load(flag, name, built_in)
    try:
        return found if name in built_in else wrap(found)
    except ValueError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _policy_loss(name: str) -> PolicyLoss:
    """The policy loss of a name with its default options."""
    return _named("--policy-loss", name, POLICY_LOSSES, functools.partial(policy_loss_of, name.rpartition(":")[2]))


def _with_options(context: combinations.FlagContext, values: dict[str, object]) -> PolicyLoss:
    try:
        return context.policy_loss.with_options(values)
    except ValueError as error:
        raise UsageError(f"--policy-loss {context.settings.policy_loss}: {error}") from None


def _role_settings(
    settings: Settings,
    values: dict,
    tokens: dict[str, list[str]],
    ranks: dict[str, range],
    context: combinations.FlagContext,
) -> dict[str, RoleSettings]:
    from megarl.mcore.config import architecture, exact_rules, megatron_flags

    longest = settings.max_prompt_length + settings.max_response_length
    own = {"train_iters": settings.train_iters, "seed": settings.seed}
    lengths = dict.fromkeys(ranks, longest) | {"reward": settings.reward_max_length or longest}
    extra = frozenset({"global_batch_size"}) if context.program in ("sft", "reward") else frozenset()
    chosen = {role: _own_of_role(role, settings, values) for role in ranks}
    hf_models = read_hf_models(context.program, settings, chosen, lengths)
    found = {}
    for role, role_ranks in ranks.items():
        hf_model = hf_models[role]
        own_of_role = own | {"seq_length": lengths[role], "draws_weights": hf_model is None}
        own_of_role["exact_rollout"] = settings.exact_rollout and role in ("actor", "rollout")
        described = hf_model.tokens() if hf_model else []
        folder = f"{hf_model.folder.flag} {hf_model.folder.path}" if hf_model else ""
        role_tokens = architecture.with_folder(role, described, folder, tokens[role]) if hf_model else tokens[role]
        try:
            found[role] = megatron_flags.parse(role, role_tokens, len(role_ranks), own_of_role, extra)
        except UsageError as error:
            raise architecture.with_source(error, described, folder) from None
        chosen[role] = with_hf_defaults(role, chosen[role], values, hf_model)
    adapters = {role: own["lora_adapter"] for role, own in chosen.items()}
    lora = lora_of_roles(chosen, found, hf_models, role_flags.TRAINED_ROLES[context.program])
    exact_rules.check_lora(found, lora)
    has_reward_model = combinations.CONDITIONS["model"].holds(context)
    for role in (name for name in ranks if name in MODELS and chosen[name]["offload"]):
        if found[role].use_torch_fsdp2:
            raise UsageError(
                f"--{role}-offload: not allowed with --use-torch-fsdp2, whose sharded parameters cannot move"
            )
    model_roles = {role: role for role in ranks}
    if "rollout" in ranks and ranks["rollout"] == ranks["actor"]:
        model_roles["rollout"] = "actor" if role_flags.can_share_model(found["actor"], found["rollout"]) else "rollout"
    if "rollout" in ranks:
        lora["rollout"] = lora["actor"]
    has_model = {role: role != "reward" or has_reward_model for role in ranks}
    return {
        role: RoleSettings(
            role,
            role_ranks,
            found[role],
            model_role=model_roles[role],
            has_model=has_model[role],
            hf_model=hf_models[role],
            lora=lora[role],
            lora_adapter=adapters[role],
            **chosen[role],
        )
        for role, role_ranks in ranks.items()
    }


def _own_of_role(role: str, settings: Settings, values: dict) -> dict:
    """A role's values of those of megarl's own flags that may have a role prefix."""
    fields = [field for field in dataclasses.fields(Settings) if field.metadata["roles"]]
    return {f.name: values.get(f"{role}-{f.name.replace('_', '-')}", getattr(settings, f.name)) for f in fields}


def check_microbatches(config: RunConfig):
    """UsageError unless each role's micro-batches hold its longest sequence, or a pair of them in train_reward."""
    sequences = 2 if list(config.roles) == ["reward"] else 1
    for role in config.with_models():
        cap, longest = role.max_tokens_per_microbatch, role.megatron.seq_length
        if cap < sequences * longest:
            prefix = "" if cap == config.settings.max_tokens_per_microbatch else f"{role.name}-"
            is_reward_limit = longest == config.settings.reward_max_length
            limit = "--reward-max-length" if is_reward_limit else "--max-prompt-length + --max-response-length"
            needed = "one sequence" if sequences == 1 else "a pair"
            each = "" if sequences == 1 else " each"
            raise UsageError(
                f"--{prefix}max-tokens-per-microbatch {cap}: must hold {needed} of {limit} = {longest} tokens{each}"
            )
