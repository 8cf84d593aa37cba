"""The teachers' weights, tokenizers and lines, checked before any work starts."""

import numpy as np
import torch
from torch import Tensor

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint.pretrained import PretrainedWeights, checkpoint_weights, find_pretrained, folder_weights
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer, build_tokenizer
from megarl.errors import UsageError, flag_of
from megarl.flags.distillation import DEFAULT_TEACHER, GIVEN, TEACHERS_FLAG
from megarl.mcore.config.supported_flags import ARCHITECTURE
from megarl.trainers.setup import check_vocabulary


def find_teachers(config: RunConfig, encoder: Encoder) -> list[PretrainedWeights | None]:
    """The weights of each teacher's model; None: those that the policy starts from are drawn from the seed, by both
    alike.

    Args:
        encoder: the policy's.

    Raises:
        UsageError: no teacher, other weights or another model than `--teacher` says, or another tokenizer.
    """
    if not config.teachers.names:
        return [_find_teacher(config, encoder) for _ in config.teachers.models]
    for role in config.teachers.models:
        _check_vocabularies(config, role, encoder)
    tokens = encoder.tokenizer.vocab_size
    return [
        checkpoint_weights(role.run_folder, TEACHERS_FLAG, role, role.model_vocab_size(tokens))
        if role.run_folder
        else folder_weights(role)
        for role in config.teachers.models
    ]


def _check_vocabularies(config: RunConfig, teacher: RoleSettings, encoder: Encoder):
    """UsageError unless a teacher has at least the policy's tokens."""
    tokens = encoder.tokenizer.vocab_size
    wanted, known = (role.model_vocab_size(tokens) for role in (config.roles["actor"], teacher))
    check_vocabulary(teacher, wanted)
    _check_tokens(encoder.tokenizer, teacher)
    if known < wanted:
        source = "the teacher" if teacher.run_folder is None else f"{TEACHERS_FLAG} {teacher.run_folder}"
        raise UsageError(f"{source}: has {known} tokens, the policy's model {wanted}; give one with as many")


def _find_teacher(config: RunConfig, encoder: Encoder) -> PretrainedWeights | None:
    """The weights of the only teacher, as of `find_teachers`."""
    s, teacher, actor = config.settings, config.roles["teacher"], config.roles["actor"]
    own_folder = teacher.hf_model is not None and _folder(teacher) != _folder(actor)
    own_checkpoint = teacher.megatron.pretrained_checkpoint != actor.megatron.pretrained_checkpoint
    if s.teacher != GIVEN and (own_folder or own_checkpoint):
        flag = "--teacher-hf-model" if own_folder else "--teacher-pretrained-checkpoint"
        raise UsageError(f"--teacher {s.teacher}: the teacher has the policy's weights; leave out {flag}")
    if s.teacher == GIVEN and not (own_folder or own_checkpoint):
        raise UsageError(
            f"--distill {s.distill}: needs a teacher: another --teacher-hf-model or --teacher-pretrained-checkpoint "
            "than the policy's, or --teacher self"
        )
    if s.teacher != GIVEN:
        check_same_model(f"--teacher {s.teacher}", actor, teacher)
    _check_vocabularies(config, teacher, encoder)
    # A checkpoint that only the policy is meant to start from says nothing about a teacher in a folder of its own.
    if own_folder and not own_checkpoint:
        return folder_weights(teacher)
    return find_pretrained(teacher, teacher.model_vocab_size(encoder.tokenizer.vocab_size))


def check_same_model(flag: str, actor: RoleSettings, other: RoleSettings):
    """UsageError if a role that gets the actor's weights is another model. `flag`: that says so, with its value."""
    for name in sorted(ARCHITECTURE):
        wanted, found = (getattr(role.megatron, name) for role in (actor, other))
        if wanted != found:
            raise UsageError(
                f"{flag}: the {other.name} gets the actor's weights, but {flag_of(name)} is {found} there "
                f"and {wanted} in the actor; give both the same model"
            )


def _folder(role: RoleSettings) -> str | None:
    return None if role.hf_model is None else str(role.hf_model.folder.path)


def _check_tokens(policy: Tokenizer, role: RoleSettings):
    """UsageError unless every token of the policy is the same token of the teacher."""
    flag = "--teacher-tokenizer-model"
    if role.hf_model is not None and str(role.hf_model.folder.path) == role.tokenizer_model:
        flag = role.hf_model.folder.flag
    teacher = build_tokenizer(role.tokenizer_type, role.tokenizer_model, "teacher-", flag)
    if policy.fingerprint == teacher.fingerprint:
        return
    for number in range(policy.vocab_size):
        own, other = policy.piece(number), teacher.piece(number)
        if own != other:
            raise UsageError(
                f"{flag} {role.tokenizer_model}: token {number} is {other!r}, of the policy {own!r}; a teacher must "
                "have the policy's vocabulary"
            )


def teachers_of_lines(prompts: PromptSet, config: RunConfig, encoder: Encoder) -> tuple[PromptSet, Tensor | None]:
    """(the set, [lines] int64: the position of each line's teacher in `--teachers`; None without that flag).

    The set has a note if the field is not read, or some teacher has no line. One rank of a node reads the lines for
    all. `encoder`: the policy's.

    Raises:
        UsageError: a line that names another teacher, or none although none is called `default`.
    """
    names = config.teachers.names
    if not names:
        return prompts.note_unread("teacher", TEACHERS_FLAG), None

    def numbers() -> dict[str, np.ndarray]:
        return {"numbers": np.array([_number(prompts, line, names) for line in range(len(prompts))], np.int64)}

    found = prompts.on_node(numbers, "teachers", encoder, names)["numbers"]
    counts = np.bincount(found, minlength=len(names))
    idle = [name for name, count in zip(names, counts, strict=True) if not count]
    noted = prompts.noted(f"no line has the teacher {', '.join(idle)} of {TEACHERS_FLAG}") if idle else prompts
    return noted, torch.from_numpy(np.array(found))  # a copy: the array may be a file's


def _number(prompts: PromptSet, line: int, names: tuple[str, ...]) -> int:
    name = prompts[line].teacher
    if name is None and DEFAULT_TEACHER not in names:
        raise UsageError(
            f"{prompts.where(line)}: teacher is missing, and {TEACHERS_FLAG} has none called {DEFAULT_TEACHER}; "
            f"allowed: {', '.join(names)}"
        )
    if name is not None and name not in names:
        raise UsageError(
            f"{prompts.where(line)}: teacher {name!r} is not in {TEACHERS_FLAG}; allowed: {', '.join(names)}"
        )
    return names.index(DEFAULT_TEACHER if name is None else name)
