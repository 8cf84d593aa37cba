"""`megarl.replay` in a world of forked ranks."""

import contextlib
import io
from pathlib import Path

from megarl import arguments
from megarl.replay import ReplayRequest, prepared, replay
from tests.helpers.worlds import run_world


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
