"""The check that environments can be made, in a process of its own, so that no rank ever imports a user's module."""

import os
from collections.abc import Sequence

from megarl.child_process import Child, parent
from megarl.environments.agents.agent import Agent, as_agent, check_packages
from megarl.environments.loading import load_factory
from megarl.errors import UsageError
from megarl.user_results import is_generator, settled

# Who answers the policy's turns: an environment as the user or as tools, or an agent, which owns the loop.
USER, TOOLS, AGENT = KINDS = ("user", "tool", "agent")
METHODS = ("reset", "step", "restore", "close")


def check_factories(names: Sequence[str]) -> dict[str, str]:
    """The kind of each environment, of `KINDS`. UsageError for one that cannot be made."""
    child = Child("megarl.environments.check")
    try:
        child.send(list(names))
        found = child.connection.recv()
    except (EOFError, OSError):
        raise UsageError(f"--environment: the check ended with status {child.status()}") from None
    finally:
        child.end()
    if isinstance(found, str):
        raise UsageError(found)
    return found


def main():
    """The child: answers a list of names with a dictionary, or with the text of an error."""
    connection = parent()
    try:
        connection.send({name: _kind(name) for name in connection.recv()})
    except UsageError as error:
        connection.send(str(error))
    os._exit(0)


def _kind(name: str) -> str:
    factory = load_factory(name)
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
