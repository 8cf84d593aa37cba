"""The prompts of a run with an environment as the run builds them: with its tools, and what its reset says.

A reset on the longest line and one on the shortest tell, before any work starts, what an environment adds. If that
depends on the line, it counts on these two alone, and a note says so. What an agent asks is not known.
"""

import json

import numpy as np

from megarl.arguments import Settings
from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong
from megarl.data.ragged import Ragged
from megarl.data.turns import TurnTokens
from megarl.environments.loading import AGENT, TOOLS, USER, FirstObservation, check_factories, first_observations
from megarl.errors import UsageError
from megarl.rollout.episodes.runner import task_of
from megarl.trainers.environment_inputs import check_kinds

_UNKNOWN = (
    "what {} is not known before the run; tokens of its first request beyond --max-prompt-length count as response"
)
_UNIT = "prompts, with what their environments add,"
_NOTHING = FirstObservation([], [])  # from an environment that failed


def fitting(settings: Settings, encoder: Encoder, prompts: PromptSet, tokens: Ragged) -> tuple[PromptSet, Ragged]:
    """The prompts that fit with what their environments add, with notes on that, and their tokens without it.

    One rank of a node measures them for all.

    Args:
        tokens: of the lines alone, all within `--max-prompt-length`.

    Raises:
        UsageError: one is too long and `--filter-long-prompts` is not given, or it leaves none.
    """
    s = settings
    if s.agent_sessions:
        return prompts.noted(_UNKNOWN.format("a driver asks")), tokens
    alone = np.diff(tokens.offsets)
    found = prompts.on_node(
        lambda: _measured(s, encoder, prompts, alone),
        "first prompts",
        encoder,
        s.environment,
        s.environment_timeout,
        s.max_prompt_length,
        s.filter_long_prompts,
    )
    kept = (found["lengths"] <= s.max_prompt_length).nonzero()[0]
    for note in json.loads(found["notes"].tobytes()):
        prompts = prompts.noted(note)
    if len(kept) == len(prompts):
        return prompts, tokens
    limits = f"--max-prompt-length {s.max_prompt_length}"
    return prompts.without_long(kept, _UNIT, limits, str(s.max_prompt_length)), tokens.select(kept)


def _measured(s: Settings, encoder: Encoder, prompts: PromptSet, alone: np.ndarray) -> dict[str, np.ndarray]:
    """`lengths` [N] int64 of the prompts as far as they are known, and `notes` as JSON. `alone` [N]: of the lines."""
    lengths, notes, texts = alone.astype(np.int64), [], TurnTokens(encoder, s.max_observation_length)
    lines_of: dict[str, list[int]] = {}
    for prompt in prompts:
        lines_of.setdefault(prompt.environment or str(s.environment), []).append(prompt.index)
    kinds = check_factories(sorted(lines_of))
    for name, lines in sorted(lines_of.items()):
        if kinds[name] == AGENT:
            notes.append(_UNKNOWN.format(f"the agent {name} asks"))
            continue
        lines.sort(key=lambda line: (alone[line], line))
        added = _Added(s, prompts, name, lines)
        if added.tools and kinds[name] == USER:  # it has them since its reset
            check_kinds(s, encoder, {TOOLS})
        if added.is_something:
            for line in lines:
                lengths[line] = added.length(texts, prompts[line])
        longest = max(lines, key=lambda line: lengths[line])
        if lengths[longest] > s.max_prompt_length and not s.filter_long_prompts:
            raise TooLong(
                f"{prompts.where(longest)}: the prompt has {lengths[longest]} tokens with {added.text}; "
                f"--max-prompt-length allows {s.max_prompt_length}{TooLong.CURE}"
            )
        of_kept = [int(lengths[line]) for line in lines if lengths[line] <= s.max_prompt_length]
        notes += added.notes(max(of_kept, default=0))
    return {"lengths": lengths, "notes": np.frombuffer(json.dumps(notes).encode(), np.uint8)}


class _Added:
    """What an environment adds to the prompts of its lines."""

    def __init__(self, s: Settings, prompts: PromptSet, name: str, lines: list[int]):
        """`lines`: numbers of prompts, the shortest first. UsageError if a filter would need what cannot be known."""
        self._name, self._ends = name, list(dict.fromkeys((lines[-1], lines[0])))
        self._where, self._problem = prompts.where(lines[-1]), ""
        self._seen: dict[int, FirstObservation] = {}  # by line
        tasks = [task_of(prompts[line], seed, seed) for seed, line in enumerate(self._ends)]
        found = first_observations(name, tasks, s.environment_timeout)
        if isinstance(found, str):
            self._problem = found
            if s.filter_long_prompts:
                raise UsageError(f"--filter-long-prompts: {self._failure}")
        else:
            self._seen = dict(zip(self._ends, found, strict=True))
        first, *others = self._seen.values() or [_NOTHING]
        self.tools = first.tools if all(other.tools == first.tools for other in others) else []
        self._is_same = all(other == first for other in others)
        # Of any line; what depends on the line counts where it is known.
        self._common = first if self._is_same else FirstObservation(self.tools, [])

    @property
    def is_something(self) -> bool:
        """Whether the prompts are longer than their lines."""
        return any(seen.tools or seen.messages for seen in self._seen.values())

    @property
    def text(self) -> str:
        """What it is, in words."""
        kinds = {"the tools": "tools", "the first message": "messages"}
        there = [name for name, kind in kinds.items() if any(getattr(seen, kind) for seen in self._seen.values())]
        return f"{' and '.join(there)} of --environment {self._name}"

    @property
    def _failure(self) -> str:
        return f"the reset of --environment {self._name} failed on one of its lines, {self._where}: {self._problem}"

    def length(self, texts: TurnTokens, prompt: Prompt) -> int:
        """Tokens of a prompt. UsageError if it cannot be built."""
        added = self._seen.get(prompt.index, self._common)
        messages = [*prompt.conversation, *added.messages]
        try:
            return len(texts.first_prompt(messages, added.tools or prompt.tools))
        except UsageError as error:
            raise UsageError(f"--environment {self._name}: {error}") from None

    def notes(self, longest: int) -> list[str]:
        """What to tell the user. `longest`: tokens of the longest prompt that fits."""
        if self._problem:
            return [f"{self._failure}; what it adds to prompts is not counted"]
        if not self.is_something:
            return []
        unknown = f"; it adds other text on other lines, which counts on {self._where} alone"
        return [f"prompts have at most {longest} tokens with {self.text}{unknown * (not self._is_same)}"]
