"""Environments by the name of `--environment`: built-in ones, or a user's factory; and their checks before the run.

The checks run in a process of their own, so that no rank ever imports a user's module.
"""

import asyncio
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from megarl import plugins
from megarl.child_process import Child, parent
from megarl.environments import ENVIRONMENTS
from megarl.environments.agents.agent import Agent, as_agent, check_packages
from megarl.environments.protocol import ImageBytes, Message, Task, called, seen_of
from megarl.errors import UsageError, one_line
from megarl.user_results import LateCall, is_generator, limited, settled

# Who answers the policy's turns: an environment as the user or as tools, or an agent, which owns the loop.
USER, TOOLS, AGENT = KINDS = ("user", "tool", "agent")
METHODS = ("reset", "step", "restore", "close")
_GRACE = 30.0  # seconds for a process to start, and to import a module


class FirstObservation(NamedTuple):
    """What an environment adds to a prompt when it is reset."""

    tools: list[dict[str, Any]]
    messages: list[Message]
    images: ImageBytes = {}  # noqa: RUF012  # of the messages; never changed in place


def check_factories(names: Sequence[str]) -> dict[str, str]:
    """The kind of each environment, of `KINDS`. UsageError for one that cannot be made."""
    try:
        found = _asked(list(names))
    except ChildProcessError as error:
        raise UsageError(f"--environment: the check {error}") from None
    if isinstance(found, str):
        raise UsageError(found)
    return found


def first_observations(name: str, tasks: Sequence[Task], seconds: float) -> list[FirstObservation] | str:
    """What the environment `name`, which is no agent, adds to the prompts of tasks; a text: why it has failed on one. A
    call of it may take `seconds`.
    """
    try:
        found = _asked((name, list(tasks), seconds), _GRACE + 3 * seconds * len(tasks))
    except ChildProcessError as error:
        return f"its process {error}"
    if found is None:
        return f"no answer within {seconds:g} s"
    return found if isinstance(found, str) else [FirstObservation._make(each) for each in found]


def _asked(question: Any, seconds: float | None = None) -> Any:
    """What the child answers; None: nothing in so many seconds. ChildProcessError if it has ended."""
    child = Child("megarl.environments.loading")
    try:
        child.send(question)
        return child.connection.recv() if child.connection.poll(seconds) else None
    except (EOFError, OSError):
        raise ChildProcessError(f"ended with status {child.status()}") from None
    finally:
        child.end()


def main():
    """The child: answers a list of names with a dictionary, or with the text of an error; and the arguments of
    `first_observations` with its result."""
    connection = parent()
    asked = connection.recv()
    if not isinstance(asked, list):
        asyncio.run(_answer(connection, asked))
    try:
        connection.send({name: _kind(name) for name in asked})
    except UsageError as error:
        connection.send(str(error))
    os._exit(0)


async def _answer(connection: Connection, asked: tuple[str, list[Task], float]) -> NoReturn:
    """Answers, and ends the process, whatever threads an environment has left."""
    connection.send(await _first_observations(asked))
    os._exit(0)


async def _first_observations(asked: tuple[str, list[Task], float]) -> list[tuple[list, list, ImageBytes]] | str:
    name, tasks, seconds = asked
    found, factory = [], plugins.load("--environment", name, ENVIRONMENTS, awaits=True)
    for task in tasks:
        try:
            environment = await limited(called(factory), seconds, "answer")
            first = await limited(called(environment.reset, task.with_names()), seconds, "answer")
            observation, images = await seen_of(first)
            found.append((list(environment.tools), observation.messages, images))
            await limited(called(environment.close), seconds, "answer")
        except LateCall as late:
            return str(late)
        except (Exception, SystemExit) as error:
            return one_line(f"{type(error).__name__}: {error}")[:300]
    return found


def _kind(name: str) -> str:
    factory = plugins.load("--environment", name, ENVIRONMENTS, awaits=True)
    try:
        environment = as_agent(factory) or settled(factory())
        if isinstance(environment, Agent):
            check_packages(environment)
            return AGENT
        missing = [m for m in METHODS if not callable(getattr(environment, m, None))]
        if missing or not isinstance(getattr(environment, "tools", None), list):
            raise TypeError(f"{type(environment).__name__} lacks {', '.join(missing) or 'tools'} of the protocol")
        if yielding := [m for m in METHODS if is_generator(getattr(environment, m))]:
            raise TypeError(f"{type(environment).__name__}.{yielding[0]} yields; it returns its result")
        return TOOLS if environment.tools else USER
    except UsageError as error:  # a package that is missing
        raise UsageError(f"--environment {name}: {error}") from None
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--environment {name}: cannot be made: {reason}") from None


if __name__ == "__main__":
    main()
