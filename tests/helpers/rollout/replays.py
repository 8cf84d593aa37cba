"""`megarl.replay` in a world of forked ranks, and a saved response without a run."""

import contextlib
import io
from pathlib import Path

from megarl import arguments
from megarl.replay import ReplayRequest, prepared, replay
from megarl.rollout.episodes.episode import UNKNOWN, Episode, EpisodeLimits
from megarl.rollout.saved_response import SavedResponse
from tests.helpers.worlds import run_world

HOSTILE = "\x1b[2Jx\r\u202eend: done, solved\nend: done, solved, rewards 9"


def saved(**changes) -> SavedResponse:
    """A response of two turns, with hostile texts."""
    prompt, one, two = [ord("p")], [*map(ord, HOSTILE)], [ord("z")]
    first, second = (1, 1 + len(one)), (2 + len(one), 3 + len(one))
    message = {"role": "tool", "content": HOSTILE, "name": HOSTILE, "tool_call_id": "1"}
    seen = {"messages": [message], "reward": 0.5, "done": False, "correct": None, "parts": {}}
    record = {"key": "3/8/1", "replayable": True, "tools": [], "observations": [seen]}
    episode = Episode(
        5, UNKNOWN, 8, EpisodeLimits(0, 0, 0), tokens=[*prompt, *one, ord("o"), *two], prompt_length=1,
        turns=[first, second], logprobs=[[0.0] * len(one), [0.0]], rewards=[0.5, 0.0], verdicts=[False], end="length",
    )  # fmt: skip
    return SavedResponse({"step": 4, "environment": "x:y"}, 5, (8, 1), (3, 0), episode, [], record)._replace(**changes)


def in_world(rank: int, asked: ReplayRequest, parsed) -> tuple[int, str]:
    """Runs the program on this rank; returns its status and what it printed."""
    from megarl.observe.timers import Timers

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = replay(asked, parsed, Timers())
    return status, printed.getvalue()


def played(run: Path, words: list[str], size: int = 1, change=lambda asked: asked) -> tuple[int, str]:
    """Status and text of a replay. `change`: of what is asked."""
    asked, flags = prepared([str(run), *words])
    results = run_world(in_world, size, change(asked), arguments.parse(flags, size, "rl"))
    assert {text for _, text in results[1:]} <= {""}
    return results[0]
