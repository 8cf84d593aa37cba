"""The prompt sets of a program: `--prompts` and `--eval-prompts`, read with the columns of its flags."""

from pathlib import Path
from typing import TextIO

from megarl.arguments import Settings
from megarl.checkpoint.resume import EVAL_PROMPTS, EVALS, PROMPTS
from megarl.data.columns import RL, Columns
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet, load_prompts
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.observe.terminal import printable
from megarl.plain_files import parse_named_paths
from megarl.trainers import environment_inputs

_FLAGS = {PROMPTS: "--prompts", EVAL_PROMPTS: "--eval-prompts"}


def read_prompts(settings: Settings, purpose: str, encoder: Encoder) -> dict[str, PromptSet]:
    """The sets of the flags that are given, by name in a checkpoint's manifest. UsageError for wrong files.

    `purpose`: of `columns`. `encoder`: of the texts.
    """
    s = settings
    columns = Columns(
        purpose=purpose, prompt=s.prompt_column, answer=s.answer_column, response=s.response_column,
        messages=s.messages_column, chosen=s.chosen_column, rejected=s.rejected_column, desirable=s.desirable_column,
        images=s.images_column,
    )  # fmt: skip
    values = {PROMPTS: s.prompts, EVAL_PROMPTS: s.eval_prompts}
    values |= {f"{EVALS}{name}": path for name, path in (parse_named_paths(s.evals) if s.evals else {}).items()}
    flags = _FLAGS | {name: f"--{name}" for name in values if name not in _FLAGS}
    check_images_flags(s, encoder)
    found = {
        name: load_prompts(value, flags[name], columns, encoder.images, s.images_folder)
        for name, value in values.items()
        if value
    }
    return {name: prompts.note_special_tokens(encoder) for name, prompts in found.items()}


def check_images_flags(settings: Settings, encoder: Encoder):
    """UsageError for flags of images with a model that reads none, and for a folder that is none."""
    s = settings
    given = {"--images-column": s.images_column, "--images-folder": s.images_folder}
    for flag, value in given.items():
        if value is not None and encoder.images is None:
            raise UsageError(f"{flag} {value}: needs --hf-model with a vision tower, and a chat template")
    if s.images_folder is not None and not Path(s.images_folder).is_dir():
        raise UsageError(f"--images-folder {s.images_folder}: no such folder")
    if encoder.images is not None and s.images_column is not None:
        encoder.images.processor  # noqa: B018  # UsageError: the folder has none


def read_encoded_prompts(settings: Settings, encoder: Encoder) -> tuple[dict[str, PromptSet], dict[str, Ragged]]:
    """The sets to generate from, and the tokens of their prompts; without over-long ones with `--filter-long-prompts`.

    What an environment adds to a prompt counts, as far as it can be known, but is not among the tokens.

    UsageError for wrong files, a prompt that is too long, or a filter that leaves none.
    """
    prompts, tokens = read_prompts(settings, RL, encoder), {}
    for name, found in prompts.items():
        check_mixture(settings, found)
        if settings.filter_long_prompts:
            prompts[name], tokens[name] = found.encode_fitting(encoder, settings.max_prompt_length)
        else:
            tokens[name] = found.encode(encoder, settings.max_prompt_length)
        if settings.environment is not None:
            prompts[name], tokens[name] = environment_inputs.fitting(settings, encoder, prompts[name], tokens[name])
    return prompts, tokens


def check_mixture(settings: Settings, prompts: PromptSet):
    """UsageError if a file of a mixture has a limit above that of the run, or needs what the run lacks."""
    s = settings
    for entry in prompts.entries:
        where = f"{prompts.flag} {prompts.path}: {entry.name}"
        limits = {
            "max-prompt-length": (entry.max_prompt_length, s.max_prompt_length),
            "max-response-length": (entry.max_response_length, s.max_response_length),
        }
        for name, (own, limit) in limits.items():
            if (own or 0) > limit:
                raise UsageError(f"{where}: {name} {own}: allowed is at most --{name} {limit}")
        if entry.environment is not None and s.environment is None:
            raise UsageError(f"{where}: environment {entry.environment}: needs --environment, for lines without one")
        if entry.max_response_length is not None and s.environment is not None:
            raise UsageError(f"{where}: max-response-length: not allowed with --environment, whose episodes share one")
        if s.overlong_buffer > (entry.max_response_length or s.overlong_buffer):
            raise UsageError(
                f"{where}: max-response-length {entry.max_response_length}: allowed is at least --overlong-buffer "
                f"{s.overlong_buffer}"
            )


def name_of_eval(key: str) -> str | None:
    """The name in `--evals` of a set in a checkpoint's manifest; None of another one."""
    return key.removeprefix(EVALS) if key.startswith(EVALS) else None


def print_notes(prompts: dict[str, PromptSet], rank: int, file: TextIO | None):
    """Rank 0 prints what was recognised in the files and how many prompts were dropped, a line each."""
    if rank == 0:
        for note in notes_of(prompts):
            print(f"megarl: {printable(note)}", file=file, flush=True)


def notes_of(prompts: dict[str, PromptSet]) -> list[str]:
    """What was recognised in the files of the sets, and how many prompts were dropped."""
    return [note for found in prompts.values() for note in found.notes]
