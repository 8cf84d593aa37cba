"""A run's environments: what is checked of them before any work starts, what they add to prompts, and the HTTP process
of sessions."""

import contextlib
import json
from typing import TYPE_CHECKING

import numpy as np

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.data import node_files
from megarl.data.conversations import Encoder
from megarl.data.images.book import ReadBytes
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong
from megarl.data.ragged import Ragged
from megarl.data.template_checks import check_template
from megarl.data.turns import TurnTokens
from megarl.environments.calls import TO_LEADERS
from megarl.environments.loading import AGENT, KINDS, TOOLS, USER, FirstObservation, check_factories, first_observations
from megarl.environments.pool import kept_images
from megarl.environments.session_pool import SessionPool
from megarl.errors import UsageError, warn_as_first
from megarl.rollout.episodes.runner import task_of
from megarl.serving.configuration import check_listening
from megarl.serving.frontend_process import start_process
from megarl.tool_formats.chosen_format import load_format, name_of, unread_calls

if TYPE_CHECKING:  # it needs packages that other environments do not
    from megarl.environments.session_front import SessionsConfig


def check_environment_flags(settings: Settings):
    """UsageError for an environment of the flags that cannot be made, or a parser of tool calls that does not exist."""
    if settings.environment:
        load_format(name_of(settings.tool_call_parser, None))
        if not settings.agent_sessions:
            _kinds(settings, [settings.environment])


def sessions_of(settings: Settings) -> "SessionsConfig":
    """The configuration of `--agent-sessions`. UsageError for missing packages or keys."""
    api_keys = check_listening(settings)
    from megarl.environments.session_front import sessions_config  # needs these packages

    return sessions_config(settings, api_keys)


def check_environments(settings: Settings, encoder: Encoder, prompt_sets: dict[str, PromptSet]):
    """UsageError for an environment of a line that cannot be made, or a chat template with which a conversation cannot
    continue."""
    if not settings.environment:
        return
    named = {name for prompts in prompt_sets.values() for name in named_in(prompts, encoder)}
    others = sorted(named - {settings.environment})
    if settings.agent_sessions and others:
        raise UsageError(f"--agent-sessions: the environments of lines are not used, and some name {others[0]}")
    own = [AGENT] if settings.agent_sessions else _kinds(settings, [settings.environment])
    kinds = {*own, *(_kinds(settings, others) if others else [])}
    if settings.agent_sessions and encoder.images is not None and encoder.images.of_data:
        raise UsageError("--agent-sessions: does not go with images in prompts")
    check_kinds(settings, encoder, kinds)


def check_kinds(settings: Settings, encoder: Encoder, kinds: set[str]):
    """UsageError for a chat template with which conversations with these kinds of environments cannot continue."""
    if problem := unread_calls(settings.tool_call_parser, encoder.template):
        problem += ", or a function"
        if TOOLS in kinds:
            raise UsageError(problem)
        if AGENT in kinds:
            warn_as_first([f"{problem}, if agents offer tools"])
    form = load_format(name_of(settings.tool_call_parser, encoder.template))
    # A history that the template rewrites is a new row of an agent.
    check_template(encoder, tuple(sorted(kinds - {AGENT})), form.call_id)


def _kinds(settings: Settings, names: list[str]) -> list[str]:
    """The kind of each environment; a process of the node makes each of them once.

    UsageError for agents with a setting that needs turns in a line.
    """

    def checked() -> dict[str, np.ndarray]:
        found = check_factories(names)
        return {"kinds": np.array([KINDS.index(found[name]) for name in names])}

    kinds = [KINDS[number] for number in node_files.arrays(lambda: ("environments", *names), checked)["kinds"].tolist()]
    if AGENT in kinds:
        with_routes = settings.partial_rollouts and settings.router_replay == "rollout"
        refused = {
            "--credit turns": settings.credit == "turns",
            "--partial-rollouts with --router-replay rollout": with_routes,
        }
        if flags := [flag for flag, is_set in refused.items() if is_set]:
            name = names[kinds.index(AGENT)]
            raise UsageError(f"{flags[0]}: not with an agent, which {name} is")
    return kinds


def named_in(prompts: PromptSet, encoder: Encoder) -> list[str]:
    """The environments that lines of a set name, sorted."""

    def names() -> dict[str, np.ndarray]:
        found = sorted({prompt.environment for prompt in prompts if prompt.environment})
        return {"names": np.frombuffer("\n".join(found).encode(), np.uint8)}

    return prompts.on_node(names, "environments", encoder)["names"].tobytes().decode().split()


def open_sessions(
    config: "SessionsConfig", settings: Settings, role_groups: RoleGroups, encoder: Encoder, stack: contextlib.ExitStack
) -> SessionPool | None:
    """Starts the process on rank 0, and says where it is; the sessions of a replica on its leader, None elsewhere.

    A collective of the world.

    Args:
        role_groups: of the rollout.
        encoder: the policy's.
        stack: ends the process.

    Raises:
        UsageError: the address cannot be used.
    """
    url, link, child = start_process(stack, "megarl.environments.session_front", config, role_groups, TO_LEADERS)
    if child is not None:
        print(f"megarl: sessions of agents at {url}", flush=True)
    if link is None:
        return None
    return SessionPool(link, name_of(settings.tool_call_parser, encoder.template), settings.environment_retries)


# -- prompts as a run with an environment builds them --------------------------------------------------------------

# The prompts of a run with an environment as the run builds them: with its tools, and what its reset says.
#
# A reset on the longest line and one on the shortest tell, before any work starts, what an environment adds. If that
# depends on the line, it counts on these two alone, and a note says so. What an agent asks is not known.


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
    if found["shows_images"].any():
        assert encoder.images is not None  # else it was refused
        encoder.images.are_shown = True
    for note in json.loads(found["notes"].tobytes()):
        prompts = prompts.noted(note)
    if len(kept) == len(prompts):
        return prompts, tokens
    limits = f"--max-prompt-length {s.max_prompt_length}"
    return prompts.without_long(kept, _UNIT, limits, str(s.max_prompt_length)), tokens.select(kept)


def _measured(s: Settings, encoder: Encoder, prompts: PromptSet, alone: np.ndarray) -> dict[str, np.ndarray]:
    """`lengths` [N] int64 of the prompts as far as they are known, `notes` as JSON, and `shows_images`, whether
    environments add some. `alone` [N]: of the lines."""
    lengths, notes, texts = alone.astype(np.int64), [], TurnTokens(encoder, s.max_observation_length)
    lines_of: dict[str, list[int]] = {}
    for prompt in prompts:
        lines_of.setdefault(prompt.environment or str(s.environment), []).append(prompt.index)
    kinds, shows_images = check_factories(sorted(lines_of)), False
    for name, lines in sorted(lines_of.items()):
        if kinds[name] == AGENT:
            notes.append(_UNKNOWN.format(f"the agent {name} asks"))
            continue
        lines.sort(key=lambda line: (alone[line], line))
        added = _Added(s, prompts, name, lines, encoder.read_image)
        if added.tools and kinds[name] == USER:  # it has them since its reset
            check_kinds(s, encoder, {TOOLS})
        shows_images |= added.shows_images(encoder)
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
    text = np.frombuffer(json.dumps(notes).encode(), np.uint8)
    return {"lengths": lengths, "notes": text, "shows_images": np.array([shows_images])}


class _Added:
    """What an environment adds to the prompts of its lines."""

    def __init__(self, s: Settings, prompts: PromptSet, name: str, lines: list[int], read: ReadBytes):
        """`lines`: numbers of prompts, the shortest first; `read`: gives the bytes of images of prompts. UsageError if
        a filter would need what cannot be known."""
        self._name, self._ends = name, list(dict.fromkeys((lines[-1], lines[0])))
        self._where, self._problem = prompts.where(lines[-1]), ""
        self._seen: dict[int, FirstObservation] = {}  # by line
        tasks = [task_of(prompts[line], seed, seed, read) for seed, line in enumerate(self._ends)]
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

    def shows_images(self, encoder: Encoder) -> bool:
        """Whether it adds images, which are then known. UsageError if the model reads none."""
        problems = [problem for seen in self._seen.values() if (problem := kept_images(encoder.images, seen.images))]
        if problems:
            raise UsageError(f"--environment {self._name}: {problems[0]}")
        return any(seen.images for seen in self._seen.values())

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
