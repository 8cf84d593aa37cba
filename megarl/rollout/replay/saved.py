"""One response of a step that `--save-rollouts` has written: its tokens, and what its environment has answered."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.checkpoint import manifest as manifests
from megarl.environments.protocol import Observation
from megarl.errors import UsageError, one_line
from megarl.groups import PromptGroups
from megarl.observe.files import step_name, step_of
from megarl.observe.terminal import ranges_text
from megarl.plain_files import reason_of
from megarl.rollout.episodes.results import observations_of
from megarl.rollout.response_log import Entry
from megarl.rollout.rollout_files import EPISODE, FOLDER, RESPONSES, entries_of

Entries = dict[tuple, list[Entry]]  # of `entries_of`


class SavedResponse(NamedTuple):
    """A response; without an environment it has one turn."""

    manifest: dict[str, Any]  # of its step
    sample: int  # number in the step
    place: tuple[int, int]  # line of the prompt, and number in the group
    draw: tuple[int, int]  # step that drew the line, and how often it had before
    tokens: list[int]
    prompt_length: int
    row_starts: list[int]  # where further rows of an agent begin in `tokens`
    turns: list[tuple[int, int]]  # (start, end) of each in `tokens`
    logprobs: list[list[float]]  # of each turn
    rewards: list[float]  # of each turn; without an environment unknown, and 0
    end: str  # why it ended
    solved: bool
    versions: list[int]  # of the policies that wrote it, ascending; []: not written down
    record: dict[str, Any] | None  # of `record_of`; None without an environment

    @property
    def observations(self) -> list[Observation]:
        """What the environment has answered to its turns."""
        return [] if self.record is None else observations_of(self.record)

    @property
    def is_agent(self) -> bool:
        """Whether a program that owns the loop has asked for its turns."""
        return self.record is not None and "asked" in self.record

    def continued_turns(self) -> list[int]:
        """The turns that another one continues, counted from 0."""
        if not self.is_agent:
            seen = self.observations[: max(len(self.turns) - 1, 0)]
            return [turn for turn, each in enumerate(seen) if not each.done and each.messages]
        rows = [[*self.before(turn), *self.turn_tokens(turn)] for turn in range(len(self.turns))]
        prompts = [self.before(turn) for turn in range(len(self.turns))]
        return [turn for turn, row in enumerate(rows) if any(p[: len(row)] == row for p in prompts)]

    def before(self, turn: int) -> list[int]:
        """The tokens that the policy has read before it wrote a turn, counted from 0."""
        start = self.turns[turn][0]
        row = max((first for first in self.row_starts if first <= start), default=0)
        return self.tokens[row:start]

    def turn_tokens(self, turn: int) -> list[int]:
        """Tokens of a turn, counted from 0."""
        start, end = self.turns[turn]
        return self.tokens[start:end]


def read_response(run: str, step: int, sample: int) -> SavedResponse:
    """Response number `sample` of those that were generated for a step, counted through its rounds from 0.

    Raises:
        UsageError: there are no such files, they are damaged, or of a version that wrote less.
    """
    rollouts = Path(run) / FOLDER
    steps = {step_of(path.parent) for path in rollouts.glob(f"step_*/{manifests.NAME}")}
    if step not in steps:
        there = f"there are steps {ranges_text(steps)}" if steps else "there are none: the run needs --save-rollouts"
        raise UsageError(f"--step {step}: {rollouts} has no responses of this step; {there}")
    folder = rollouts / step_name(step)
    manifest = manifests.read(folder, "--step")
    if problem := manifests.check_sizes(folder, manifest):
        raise UsageError(f"--step {step}: {folder}: {problem}")
    try:
        return _response(folder, manifest, sample)
    except UsageError:
        raise
    except Exception as error:  # files made for harm can raise anything
        raise UsageError(one_line(f"--step {step}: {folder}: is damaged ({reason_of(error)})")) from None


def _response(folder: Path, manifest: dict[str, Any], sample: int) -> SavedResponse:
    rounds, size, left = manifest["rounds"], manifest["samples_per_prompt"], sample
    groups = [PromptGroups(round_.get("sizes") or [size] * len(round_["lines"])) for round_ in rounds]
    total = sum(of_round.count for of_round in groups)
    if not 0 <= sample < total:
        raise UsageError(f"--sample {sample}: step {manifest['step']} has the samples 0-{total - 1}")
    number = 0
    while left >= groups[number].count:
        number, left = number + 1, left - groups[number].count
    round_ = rounds[number]
    entries = entries_of(folder, manifest["replicas"], "--step")
    rows = _row(entries, number, left)
    record = _record(entries, number, left, folder) if manifest["environment"] is not None else None
    group = int(groups[number].of(torch.tensor(left)))
    tokens, length = rows["tokens"].tolist(), int(rows["prompt_lengths"])
    turns = [(length, len(tokens))] if record is None else [(int(start), int(end)) for start, end in record["turns"]]
    logprobs, mask = rows["rollout_logprobs"], rows["response_mask"]
    finished = bool(rows["finished"])
    return SavedResponse(
        manifest=manifest, sample=sample, place=(round_["lines"][group], left - int(groups[number].starts[group])),
        draw=tuple(round_["draws"][group]), tokens=tokens, prompt_length=length,
        row_starts=rows["row_starts"].nonzero().flatten().tolist() if "row_starts" in rows else [], turns=turns,
        logprobs=[logprobs[start:end].tolist() for start, end in turns],
        rewards=[0.0] * len(turns) if record is None else record["rewards"],
        end=("done" if finished else "length") if record is None else record["end"],
        solved=False if record is None else record["solved"],
        versions=rows["versions"][mask].unique().tolist() if "versions" in rows else [], record=record,
    )  # fmt: skip


def _row(entries: Entries, number: int, sequence: int) -> dict[str, Any]:
    """The fields of one sequence of a round."""
    for entry in entries.get((number, RESPONSES), ()):
        fields = entry.read().fields
        found = (fields["sequence_ids"] == sequence).nonzero().flatten().tolist()
        if found:
            start = int(fields["lengths"][: found[0]].sum())
            end = start + int(fields["lengths"][found[0]])
            names = ("tokens", "rollout_logprobs", "response_mask", "versions", "row_starts")
            of_tokens = {name: fields[name][start:end] for name in names if name in fields}
            return of_tokens | {name: fields[name][found[0]] for name in ("prompt_lengths", "finished")}
    raise ValueError(f"no sequence {sequence} in round {number}")


def _record(entries: Entries, number: int, sequence: int, folder: Path) -> dict[str, Any]:
    for entry in entries.get((number, EPISODE), ()):
        if entry.facts["sequence"] == sequence:
            observations_of(entry.facts)  # whoever edits a file can write its checksum, too
            return entry.facts
    raise UsageError(
        f"--sample: {folder}: what the environment of this episode answered is not known: it ended before the run was"
        " resumed"
    )
