"""Flags -> one frozen settings object for the program and one complete Megatron namespace a role.

megarl's own flags are the fields of `Settings`: one place for name, type, default, help and allowed values. All
other flags are Megatron's, parsed by Megatron's parser; any of them may carry a role prefix (`--critic-lr 1e-5`).
`--config FILE.yaml` holds the same names; a flag on the command line wins. Nothing is accepted and ignored.
"""

import argparse
import dataclasses
import types
import typing
from pathlib import Path

import yaml

from megarl import role_flags
from megarl.errors import UsageError
from megarl.role_flags import OFF, parse_role_map, roles_of

MODELS = ("actor", "critic", "reference")  # roles that run a model over packed text


def _flag(default, text: str, check=None, allowed: str = "", programs: str = "rl sft", roles: tuple[str, ...] = ()):
    """A field of `Settings`: `check` tells whether a given value is allowed, `allowed` says so in words; `roles` may
    have values of their own, by a prefix to the flag."""
    meta = {"help": text, "check": check, "allowed": allowed, "programs": programs.split(), "roles": roles}
    return dataclasses.field(default=default, metadata=meta)


def _positive(default, text, **kw):
    return _flag(default, text, lambda v: v > 0, "a number above 0", **kw)


def _not_negative(default, text, **kw):
    return _flag(default, text, lambda v: v >= 0, "0 or more", **kw)


def _share(default, text, **kw):
    return _flag(default, text, lambda v: 0 <= v <= 1, "between 0 and 1", **kw)


@dataclasses.dataclass(frozen=True)
class Settings:
    """megarl's own flags; a field `kl_target` is the flag `--kl-target` and the key `kl-target` of a config file."""

    role_map: str | None = _flag(None, "ranks of each role: 'actor=0-3;critic=4;…'; default: all", programs="rl")
    prompts: str | None = _flag(None, "JSONL of training prompts")
    eval_prompts: str | None = _flag(None, "JSONL of held-out prompts")
    tokenizer_type: str = _flag("SentencePieceTokenizer", "kind of tokenizer")
    tokenizer_model: str | None = _flag(None, "file of the tokenizer")
    reward: str = _flag("exact-match", "exact-match, reasoning-gym, or package.module:function", programs="rl")
    prompts_per_step: int = _positive(16, "prompts of a step", programs="rl")
    samples_per_prompt: int = _positive(4, "responses sampled for each prompt", programs="rl")
    max_prompt_length: int = _positive(512, "longest prompt, tokens")
    max_response_length: int = _positive(512, "longest response, tokens")
    temperature: float = _positive(1.0, "softmax temperature of rollout and of all log-probs", programs="rl")
    top_k: int = _not_negative(0, "sample from the k likeliest tokens; 0: all", programs="rl")
    top_p: float = _flag(1.0, "sample from the nucleus of this mass (1904.09751)", lambda v: 0 < v <= 1,
                         "above 0, at most 1", programs="rl")  # fmt: skip
    ppo_epochs: int = _positive(1, "passes over a step's batch (1707.06347)", programs="rl")
    minibatch_size: int | None = _flag(None, "sequences of an update; default the whole batch",
                                       lambda v: v is None or v > 0, "a number above 0", programs="rl")  # fmt: skip
    clip_range: float = _positive(0.2, "lower PPO clip range ε (1707.06347)", programs="rl")
    clip_range_high: float | None = _flag(None, "upper clip range (DAPO, 2503.14476); default --clip-range",
                                          lambda v: v is None or v > 0, "a number above 0", programs="rl")  # fmt: skip
    value_clip_range: float = _positive(0.2, "clip range of the value loss", programs="rl")
    gamma: float = _share(1.0, "discount of GAE (1506.02438)", programs="rl")
    gae_lambda: float = _share(0.95, "λ of GAE (1506.02438)", programs="rl")
    whiten_advantages: bool = _flag(True, "advantages to mean 0, variance 1 over the batch", programs="rl")
    kl_coefficient: float = _not_negative(0.05, "β of the KL in the token reward (2203.02155)", programs="rl")
    kl_target: float | None = _flag(None, "adapt β to this KL per response (1909.08593 §2.2); default fixed",
                                    lambda v: v is None or v > 0, "a number above 0", programs="rl")  # fmt: skip
    kl_horizon: float = _positive(10000, "horizon of the adaptive β, responses (1909.08593)", programs="rl")
    entropy_coefficient: float = _not_negative(0.0, "weight of the entropy bonus", programs="rl")
    critic_warmup_steps: int = _not_negative(0, "first steps in which only the critic learns", programs="rl")
    rollout_buffer_gb: float = _positive(0.25, "KV cache of each rollout rank, GiB", programs="rl")
    rollout_max_requests: int = _positive(256, "requests decoded together on a lane, at least 4", programs="rl")
    verify_weights: bool = _flag(False, "compare checksums after each transfer of weights to the rollout",
                                 programs="rl")  # fmt: skip
    max_tokens_per_microbatch: int = _positive(16384, "most tokens of a micro-batch; per role", roles=MODELS)
    eval_interval: int = _not_negative(0, "steps between evaluations; 0: none")
    eval_samples: int = _positive(256, "held-out prompts of an evaluation")
    target_eval_loss: float | None = _flag(None, "end the run once the evaluation loss is so low",
                                           lambda v: v is None or v > 0, "above 0", programs="sft")  # fmt: skip
    train_iters: int = _positive(100, "steps of the run")
    seed: int = _not_negative(1, "seed of everything random")
    deterministic: bool = _flag(False, "deterministic kernels; an error where there is none")
    save: str | None = _flag(None, "folder of the run: metrics, samples, report, checkpoints")
    save_interval: int = _not_negative(0, "steps between checkpoints; 0: only at the end")
    load: str | None = _flag(None, "run folder to resume from")

    def dict(self) -> dict:
        """Names as in a config file."""
        return {name.replace("_", "-"): value for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class RoleSettings:
    """One role: its world ranks, its complete, validated Megatron namespace, and what it has of megarl's own flags.

    `host` is the role whose model it runs: itself, or the actor for a rollout without a layout of its own.
    """

    name: str
    ranks: range
    megatron: argparse.Namespace
    max_tokens_per_microbatch: int
    host: str

    @property
    def microbatch_multiple(self) -> int:
        """What Megatron's interleaved schedule wants the number of micro-batches to be a multiple of."""
        has_virtual_stages = self.megatron.virtual_pipeline_model_parallel_size is not None
        return self.megatron.pipeline_model_parallel_size if has_virtual_stages else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


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
    roles, found = roles_of(program), {}
    for field in dataclasses.fields(Settings):
        if program in field.metadata["programs"]:
            name = field.name.replace("_", "-")
            found[name] = field
            found |= {f"{role}-{name}": field for role in field.metadata["roles"] if role in roles}
    return found


def build_parser(program: str) -> argparse.ArgumentParser:
    """The parser of megarl's own flags for one program ('rl' or 'sft')."""
    parser = _Parser(prog=f"megarl.train_{program}", allow_abbrev=False, epilog=(
        "Every other flag is Megatron's; a role prefix (--actor-lr, --critic-lr) sets it for one role."))  # fmt: skip
    parser.add_argument("--config", help="YAML file with the same names; the command line wins")
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


def read_config(path: str) -> list[str]:
    """A YAML file of flag names as command-line tokens, in the file's order."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: allowed is a mapping of flag names to values")
    tokens = []
    for key, value in content.items():
        if str(key) in ("config", "check"):
            raise UsageError(f"--config {path}: {key}: stands on the command line alone")
        if value is None or isinstance(value, dict):
            raise UsageError(f"--config {path}: {key}: allowed is a value or a list of values, not {value!r}")
        tokens += _tokens(str(key), value)
    return tokens


def _tokens(key: str, value) -> list[str]:
    own = {name.replace("_", "-"): _type_of(field.type) for name, field in Settings.__dataclass_fields__.items()}
    if isinstance(value, bool) and own.get(key) is not bool:
        # Megatron's switches are set by naming them; one that is off still has to be a flag that exists.
        return [f"--{key}"] if value else [OFF + key]
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]


def _check_values(chosen: dict, program: str):
    own = _own_flags(program)
    for name, value in chosen.items():
        check = own[name].metadata["check"]
        if check is not None and not check(value):
            raise UsageError(f"--{name} {value}: allowed is {own[name].metadata['allowed']}")


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program was asked to do: settings, roles, and whether only to check."""

    settings: Settings
    roles: dict[str, RoleSettings]
    check: bool


def parse(argv: list[str], world_size: int, program: str = "rl") -> Program:
    """Everything a program needs to know, from its command line alone. Raises UsageError before any work starts."""
    parser = build_parser(program)
    chosen, _ = parser.parse_known_args(argv)
    tokens = (read_config(chosen.config) if chosen.config else []) + argv
    chosen, rest = parser.parse_known_args(tokens)
    values = {k: v for k, v in vars(chosen).items() if k not in ("config", "check")}
    _check_values(values, program)
    names = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{names[k]: v for k, v in values.items() if k in names})
    ranks = parse_role_map(settings.role_map, world_size, roles_of(program))
    return Program(settings, _role_settings(settings, values, rest, ranks, program), chosen.check)


def _role_settings(settings: Settings, values: dict, rest: list[str], ranks: dict[str, range], program: str) -> dict:
    from megarl.mcore import flags  # imports Megatron: only once megarl's own flags are known to be right

    own = {
        "train_iters": settings.train_iters,
        "seed": settings.seed,
        "seq_length": settings.max_prompt_length + settings.max_response_length,
    }
    extra = frozenset({"global_batch_size"}) if program == "sft" else frozenset()
    known = [f"--{name}" for name in _own_flags(program)]
    argv = role_flags.split(rest, tuple(ranks), flags.destinations(), known)
    found = {role: flags.parse(role, argv[role], len(span), own, extra) for role, span in ranks.items()}
    hosts = {role: role for role in ranks}
    if ranks.get("rollout") == ranks["actor"] and role_flags.runs_on(found["actor"], found["rollout"]):
        hosts["rollout"] = "actor"
    caps = {role: values.get(f"{role}-max-tokens-per-microbatch", settings.max_tokens_per_microbatch) for role in ranks}
    return {role: RoleSettings(role, ranks[role], found[role], caps[role], hosts[role]) for role in ranks}
