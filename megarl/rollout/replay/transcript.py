"""A response as text for a terminal: turn by turn, with the answers and rewards, and what its replay has given."""

from collections.abc import Iterator, Sequence

from megarl.data.turns import TurnTokens
from megarl.environments.protocol import Message, Observation
from megarl.observe.terminal import printable
from megarl.rollout.episodes.episode import Episode
from megarl.rollout.replay.player import TurnCheck
from megarl.rollout.replay.saved import SavedResponse

_INDENT = "    "


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
        yield from _block(message["content"])


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
