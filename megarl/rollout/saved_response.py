"""One response of a step that `--save-rollouts` has written: its tokens, and what its environment has answered;
as text for a terminal, turn by turn."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.checkpoint import manifest as manifests
from megarl.data.images.names import readable
from megarl.data.turns import TurnTokens
from megarl.environments.protocol import Message, Observation
from megarl.errors import UsageError
from megarl.groups import PromptGroups
from megarl.observe.files import step_name, step_of
from megarl.observe.terminal import printable, ranges_text
from megarl.plain_files import reading
from megarl.rollout.episodes.episode import UNKNOWN, Episode, EpisodeLimits
from megarl.rollout.episodes.results import observations_of
from megarl.rollout.response_log import Records
from megarl.rollout.rollout_files import EPISODE, FOLDER, RESPONSES, saved_records


class SavedResponse(NamedTuple):
    """A response; without an environment it has one turn."""

    manifest: dict[str, Any]  # of its step
    sample: int  # number in the step
    place: tuple[int, int]  # line of the prompt, and number in the group
    draw: tuple[int, int]  # step that drew the line, and how often it had before
    episode: Episode  # without its request and limits; without an environment its reward is unknown, and 0
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
        episode, numbers = self.episode, range(len(self.episode.turns))
        if not self.is_agent:
            seen = self.observations[: max(len(numbers) - 1, 0)]
            return [turn for turn, each in enumerate(seen) if not each.done and each.messages]
        prompts = [episode.before(turn) for turn in numbers]
        rows = [[*episode.before(turn), *episode.turn_tokens(turn)] for turn in numbers]
        return [turn for turn, row in enumerate(rows) if any(p[: len(row)] == row for p in prompts)]


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
    with reading(f"--step {step}: {folder}", "is damaged"):
        return _response(folder, manifest, sample)


def _response(folder: Path, manifest: dict[str, Any], sample: int) -> SavedResponse:
    rounds, left = manifest["rounds"], sample
    groups = [PromptGroups(round_["sizes"]) for round_ in rounds]
    total = sum(of_round.count for of_round in groups)
    if not 0 <= sample < total:
        raise UsageError(f"--sample {sample}: step {manifest['step']} has the samples 0-{total - 1}")
    number = 0
    while left >= groups[number].count:
        number, left = number + 1, left - groups[number].count
    round_ = rounds[number]
    records = saved_records(folder, "--step")
    rows = _row(records, number, left)
    record = _record(records, number, left, folder) if manifest["environment"] is not None else None
    group = int(groups[number].of(torch.tensor(left)))
    tokens, length = rows["tokens"].tolist(), int(rows["prompt_lengths"])
    turns = [(length, len(tokens))] if record is None else [(int(start), int(end)) for start, end in record["turns"]]
    logprobs, mask = rows["rollout_logprobs"], rows["response_mask"]
    finished = bool(rows["finished"])
    end, verdicts, rewards = "done" if finished else "length", [], [0.0]
    if record is not None:
        end, verdicts, rewards = record["end"], [record["solved"]], record["rewards"]
    line = round_["lines"][group]
    episode = Episode(
        sample, UNKNOWN, line, EpisodeLimits(0, 0, 0), tokens=tokens, prompt_length=length, turns=turns, end=end,
        row_starts=rows["row_starts"].nonzero().flatten().tolist() if "row_starts" in rows else [], rewards=rewards,
        logprobs=[logprobs[start:end].tolist() for start, end in turns], verdicts=verdicts,
    )  # fmt: skip
    versions = rows["versions"][mask].unique().tolist() if "versions" in rows else []
    place = line, left - int(groups[number].starts[group])
    return SavedResponse(manifest, sample, place, tuple(round_["draws"][group]), episode, versions, record)


def _row(records: Records, number: int, sequence: int) -> dict[str, Any]:
    for entry in records.entries(number, RESPONSES):
        fields = entry.read().fields
        found = (fields["sequence_ids"] == sequence).nonzero().flatten().tolist()
        if found:
            start = int(fields["lengths"][: found[0]].sum())
            end = start + int(fields["lengths"][found[0]])
            names = ("tokens", "rollout_logprobs", "response_mask", "versions", "row_starts")
            of_tokens = {name: fields[name][start:end] for name in names if name in fields}
            return of_tokens | {name: fields[name][found[0]] for name in ("prompt_lengths", "finished")}
    raise ValueError(f"no sequence {sequence} in round {number}")


def _record(records: Records, number: int, sequence: int, folder: Path) -> dict[str, Any]:
    for entry in records.entries(number, EPISODE):
        if entry.facts["sequence"] == sequence:
            observations_of(entry.facts)  # whoever edits a file can write its checksum, too
            return entry.facts
    raise UsageError(
        f"--sample: {folder}: what the environment of this episode answered is not known: it ended before the run was"
        " resumed"
    )


# -- as text -----------------------------------------------------------------------------------------------------------


_INDENT = "    "


class TurnCheck(NamedTuple):
    """How a turn that was generated again compares with the saved one."""

    same_tokens: int  # from its start
    tokens: int  # that were generated
    same_logprobs: bool  # to the bit
    logprob_gap: float  # largest difference between log-probs of the same tokens

    @property
    def is_same(self) -> bool:
        """Whether tokens and log-probs are equal to the bit."""
        return self.same_logprobs and self.same_tokens == self.tokens


def heading(saved: SavedResponse) -> str:
    line, number = saved.place
    of = f", drawn in step {saved.draw[0]}" if saved.draw[0] != saved.manifest["step"] else ""
    return f"step {saved.manifest['step']}, sample {saved.sample}: line {line}{of}, number {number} of its group"


def saved_turns(saved: SavedResponse, texts: TurnTokens, checks: Sequence[TurnCheck] = ()) -> Iterator[str]:
    """The lines of a saved response. `checks`: of its turns; none: it was not generated again."""
    yield "prompt"
    episode, seen = saved.episode, saved.observations
    yield from _block(texts.shown(episode.tokens[: episode.prompt_length]))
    for turn in range(len(episode.turns)):
        if saved.is_agent and turn:
            yield from _asked(episode, turn, texts)
        state = "" if not checks else f" | {_compared(checks[turn])}"
        yield from _turn(episode, turn, seen, texts, state)
    yield _end(episode, has_verdict=saved.record is not None)


def forked_turns(episode: Episode, first: int, seen: Sequence[Observation], texts: TurnTokens) -> Iterator[str]:
    """The lines of the turns from `first` on, counted from 0, of an episode with another answer before them."""
    for turn in range(first, len(episode.turns)):
        yield from _turn(episode, turn, seen, texts)
    yield _end(episode)


def answer(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        name = f" {message['name']}" if message.get("name") else ""
        yield f"  {printable(message['role'] + name)}"
        yield from _block(readable(message["content"]))


def _turn(
    episode: Episode, turn: int, answers: Sequence[Observation], texts: TurnTokens, state: str = ""
) -> Iterator[str]:
    tokens, seen = episode.turn_tokens(turn), answers[turn] if turn < len(answers) else None
    reward = "" if seen is None else f", reward {seen.reward:g}"
    yield f"turn {turn + 1}: {len(tokens)} tokens{reward}{state}"
    yield from _block(texts.shown(tokens))
    yield from answer(() if seen is None else seen.messages)


def _asked(episode: Episode, turn: int, texts: TurnTokens) -> Iterator[str]:
    """What an agent has put before one of its later turns."""
    start, end = episode.turns[turn][0], episode.turns[turn - 1][1]
    rows = [first for first in episode.row_starts if end <= first <= start]
    if rows:
        yield "a row of its own"
    yield "  the agent"
    yield from _block(texts.shown(episode.tokens[max([end, *rows]) : start]))


def _compared(check: TurnCheck) -> str:
    if check.is_same:
        return "the same tokens and log-probs"
    if check.same_tokens < check.tokens:
        return f"other tokens from token {check.same_tokens + 1} on"
    return f"the same tokens, log-probs differ by at most {check.logprob_gap:.3g}"


def _end(episode: Episode, has_verdict: bool = True) -> str:
    solved = "solved" if episode.solved else "not solved"
    verdict = f", {solved}, rewards {sum(episode.rewards):g}" if has_verdict else ""
    return f"end: {episode.end}{verdict}"


def _block(text: str) -> Iterator[str]:
    """The lines of a text, which nothing in it can leave."""
    for line in text.split("\n"):
        yield _INDENT + printable(line)
