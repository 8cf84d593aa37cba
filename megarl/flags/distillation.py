"""Flags of distillation: a teacher whose distributions the policy learns, on its own responses or on given ones.

Several teachers have names and folders (`--teachers`), and each folder says what its model is.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megarl.algorithms.estimators import NO_ADVANTAGE
from megarl.algorithms.kl import DIVERGENCES, JSD
from megarl.errors import UsageError
from megarl.flags.conditions import TRAINED, Broken, FlagContext, on
from megarl.flags.fields import flag, not_negative, one_of, parses, positive
from megarl.observe.alarms import ALARMS_WITHOUT_REWARD
from megarl.plain_files import ALLOWED, parse_named_paths, resolved
from megarl.rewards import expression
from megarl.yaml_files import read_mapping

NONE, REWARD, LOSS = FORMS = ("none", "reward", "loss")
GIVEN, START, AVERAGE = TEACHERS = ("given", "self", "ema")
PROMPT, SIBLING = CONTEXTS = ("prompt", "sibling")
STUDENTS = "rl sft"

DISTILLS = on(lambda s: s.distill != NONE, "--distill is none")
DISTILL_LOSS = on(lambda s: s.distill == LOSS, "needs --distill loss")
OF_JSD = on(
    lambda s: s.distill == LOSS and s.distill_divergence == JSD, "needs --distill loss and --distill-divergence jsd"
)
CONTEXT = on(lambda s: s.distill != NONE and s.teacher_context == SIBLING, "needs --teacher-context sibling")


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Distillation."""

    distill: str = one_of(NONE, FORMS, programs=STUDENTS, when=TRAINED)
    """learn from a teacher: its log-prob of each token adds to the advantage (reward), or a divergence over the whole
    vocabulary is a loss (loss, 2306.13649)"""
    teacher: str = one_of(GIVEN, TEACHERS, programs=STUDENTS, when=DISTILLS)
    """the teacher's weights: those of --teacher-hf-model or --teacher-pretrained-checkpoint (given), those that the
    policy starts from (self), or in train_rl its moving average, --ema-decay (ema)"""
    teachers: str | None = flag(
        None, parses(parse_named_paths), f"NAME=FOLDER …, {ALLOWED}", programs=STUDENTS, several=True, when=DISTILLS
    )
    """several teachers, NAME=FOLDER …: Hugging Face folders, or run folders of megarl; the field teacher of a prompt's
    line names one, and a line without it has the one called default"""
    teacher_temperature: float = positive(1.0, programs=STUDENTS, when=DISTILLS)
    """temperature of the teacher's distributions, whatever the policy's is"""
    teacher_max_prompt_length: int | None = positive(None, when=DISTILLS)
    """maximum length of the prompt that a teacher reads, which may be a line's teacher_prompt or have a sibling's
    response, tokens; default: --max-prompt-length"""
    teacher_context: str = one_of(PROMPT, CONTEXTS, programs="rl", when=DISTILLS)
    """what the teacher reads before a response: the prompt, or a correct response of the same group and then the
    question (sibling)"""
    teacher_context_reward: float = flag(0.0, when=CONTEXT)
    """a sibling's response is read if its reward is the highest of its group and above this; 1 is that of a correct one
    where no term of --reward counts"""
    teacher_context_template: str = flag("configs/teacher_context.txt", when=CONTEXT)
    """text file with the places {question} and {response}: what the teacher reads instead of the user's last message"""
    distill_coefficient: float = positive(1.0, programs=STUDENTS, when=DISTILLS)
    """weight of what the teacher says: of its share of the advantage, or of the divergence in the loss"""
    distill_divergence: str = one_of("reverse", DIVERGENCES, programs=STUDENTS, when=DISTILL_LOSS)
    """divergence of the loss: KL(teacher‖policy) (forward), KL(policy‖teacher) (reverse), or the generalized
    Jensen-Shannon divergence (jsd)"""
    distill_beta: float = flag(0.5, lambda v: 0 < v < 1, "between 0 and 1", programs=STUDENTS, when=OF_JSD)
    """share β of the teacher in the mixture of jsd"""
    distill_sft_coefficient: float = not_negative(0.0, programs="sft", when=DISTILL_LOSS)
    """weight of the cross-entropy of the given tokens beside the divergence"""

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """The teachers of `--teachers`; none of a run with one teacher, or none."""
        return () if self.teachers is None else tuple(parse_named_paths(self.teachers))

    @property
    def reads_siblings(self) -> bool:
        """Whether a teacher reads another response of the same group."""
        return self.teacher_context == SIBLING


def with_defaults_of_distillation(fields: dict[str, Any]) -> dict[str, Any]:
    """Values of megarl's own flags of a run that has a teacher: without a reward that counts it has no advantages."""
    reward = fields.get("reward", expression.NONE)
    if any(term.weight for term in expression.parse(reward)):
        return fields
    of_teacher_alone = {"advantage": NO_ADVANTAGE, "kl_coefficient": 0.0, "alarms": ALARMS_WITHOUT_REWARD}
    return of_teacher_alone | fields | {"reward": reward}


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of the form of distillation, of the teacher's weights, and of what it reads."""
    s, is_average = run.settings, run.settings.teacher == AVERAGE
    longest, reads_siblings = s.teacher_max_prompt_length or 0, s.teacher_context == SIBLING
    if run.program == "sft" and s.distill == REWARD:
        yield "--distill", "adds to advantages, which train_sft has none of; allowed are none, loss"
    if run.program == "sft" and is_average:
        yield "--teacher", "only in train_rl; allowed are given, self"
    if is_average and s.ema_decay is None:
        yield "--teacher", "needs --ema-decay"
    if is_average and s.generation_lag:
        yield "--teacher", "needs --generation-lag 0: the average of a step is known when the step is trained"
    if s.teachers is not None and s.teacher != GIVEN:
        yield "--teachers", f"names the teachers' folders; not allowed with --teacher {s.teacher}"
    if reads_siblings and s.samples_per_prompt == 1:
        yield "--teacher-context", "needs --samples-per-prompt 2 or more: the sibling is another response to the prompt"
    if reads_siblings and not run.terms:
        yield (
            "--teacher-context",
            "needs a --reward that says which responses are correct; one of weight 0, as "
            f"0*{expression.EXACT_MATCH}, is not learnt",
        )
    if reads_siblings and longest <= s.max_prompt_length:
        yield (
            "--teacher-context",
            f"needs --teacher-max-prompt-length above --max-prompt-length {s.max_prompt_length}: a response is "
            "before the question",
        )
    if reads_siblings and s.environment is not None:
        yield "--teacher-context", "not allowed with --environment, whose responses hold its own texts"


TEACHERS_FLAG = "--teachers"
DEFAULT_TEACHER = "default"  # the teacher of lines that name none
ALIGNMENT = 8  # bytes of a row of several models' states: a multiple of every dtype's
SETTINGS_FILE = "settings.yaml"  # of a run
# What else gives weights their shapes, besides the attributes of an architecture.
_OTHER_SHAPES = ("make_vocab_size_divisible_by", "max_position_embeddings")


class TeacherModels(NamedTuple):
    """The models of the role teacher. They have the same ranks and layout, and may be of any architecture."""

    names: tuple[str, ...] = ()  # of `--teachers`, in its order; none: a run has one teacher without a name, or none
    models: tuple[Any, ...] = ()  # `RoleSettings`; folders that are the same are one model
    model_of: tuple[int, ...] = ()  # by name: the number of its model

    @property
    def take_turns(self) -> bool:
        """Whether several models share the role's device memory."""
        return len(self.models) > 1

    @property
    def state_bytes(self) -> int:
        """Bytes of a row that holds a hidden state of any of the models; 0 without a model."""
        sizes = (role.megatron.hidden_size * role.megatron.params_dtype.itemsize for role in self.models)
        widest = max(sizes, default=0)
        return -(-widest // ALIGNMENT) * ALIGNMENT if self.take_turns else widest


class TeacherFolder(NamedTuple):
    """What a folder of `--teachers` says about its model."""

    hf_model: str | None  # the Hugging Face folder that describes it; None: `attributes` do
    attributes: dict[str, Any]  # of Megatron's namespace
    run: str | None  # what names a checkpoint of megarl with its weights; None: they are in the Hugging Face folder
    model_source: str | None = None  # of a run; None: that of the flags


def read_folder(path: str) -> TeacherFolder:
    """What a Hugging Face folder, a run folder of megarl, or one of its checkpoints says about its policy.

    Raises:
        UsageError: it is neither, or a run without a policy.
    """
    if (Path(path) / "config.json").is_file():
        return TeacherFolder(path, {}, None)
    run = next((each for each in (Path(path), *Path(path).parents[:2]) if (each / SETTINGS_FILE).is_file()), None)
    if run is None:
        raise UsageError(
            f"{TEACHERS_FLAG} {path}: allowed is a Hugging Face folder (with config.json), a run folder of megarl "
            f"(with {SETTINGS_FILE}), or one of its checkpoints"
        )
    where = f"{TEACHERS_FLAG} {run / SETTINGS_FILE}"
    settings, _ = read_mapping(str(run / SETTINGS_FILE), where, "settings")
    try:
        of_run, described = settings["megarl"], settings["roles"]["actor"]["megatron"]
        hf_model, model_source = of_run.get("hf_model"), of_run.get("model_source", "megatron")
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{where}: describes no policy (roles: actor: megatron)") from None
    return TeacherFolder(hf_model, {} if hf_model else _shape(described), path, model_source)


def _shape(stored: dict[str, Any]) -> dict[str, Any]:
    """The attributes that give the weights of a run's policy their shapes and their meaning."""
    from megarl.mcore.config.supported_flags import ARCHITECTURE  # imports Megatron

    found = {name: stored[name] for name in (*sorted(ARCHITECTURE), *_OTHER_SHAPES) if name in stored}
    if found.get("multi_latent_attention"):
        found["kv_channels"] = None  # Megatron's namespace has those of the values there
    if found.get("position_embedding_type") != "learned_absolute":
        found.pop("max_position_embeddings", None)  # no table of that length
    if isinstance(found.get("window_size"), list):
        found["window_size"] = tuple(found["window_size"])
    return found


def check_teacher_flags(text: str | None, options: Collection[str], megatron: dict[str, str]):
    """UsageError for a flag of the role, of the `options` that are given, that says what the folders say."""
    if text is None:
        return
    from megarl.mcore.config.supported_flags import ARCHITECTURE  # imports Megatron

    described = {*ARCHITECTURE, "pretrained_checkpoint"}
    for option in options:
        name = megatron.get("--" + option.removeprefix("--teacher-")) if option.startswith("--teacher-") else None
        if option == "--teacher-hf-model" or name in described:
            raise UsageError(
                f"{option}: not allowed with {TEACHERS_FLAG}, whose folders give models and weights; leave it out"
            )


def teacher_models(text: str, build: Callable[[TeacherFolder], Any]) -> TeacherModels:
    """The models of `--teachers`. `build`: makes the `RoleSettings` for a folder, or raises UsageError."""
    folders: dict[Path, int] = {}
    models, model_of = [], []
    for name, path in parse_named_paths(text).items():
        key = resolved(path)
        if key not in folders:
            folders[key] = len(models)
            models.append(_built(name, path, build))
        model_of.append(folders[key])
    if len(models) > 1 and models[0].megatron.use_torch_fsdp2:
        raise UsageError(
            f"{TEACHERS_FLAG} {text}: not allowed with --use-torch-fsdp2: teachers take turns on the device, and "
            "sharded parameters cannot move"
        )
    return TeacherModels(tuple(parse_named_paths(text)), tuple(models), tuple(model_of))


def _built(name: str, path: str, build: Callable[[TeacherFolder], Any]) -> Any:
    try:
        return build(read_folder(path))
    except UsageError as error:
        text = str(error)
        raise UsageError(text if TEACHERS_FLAG in text else f"{text} ({TEACHERS_FLAG} {name}={path})") from None
