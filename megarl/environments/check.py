"""The check that environments can be made, in a process of its own, so that no rank ever imports a user's module."""

import os
from collections.abc import Sequence

from megarl.child_process import Child, parent
from megarl.environments.loading import load_factory
from megarl.errors import UsageError


def check_factories(names: Sequence[str]) -> dict[str, bool]:
    """For each environment, whether it has tools. UsageError for one that cannot be made."""
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
        connection.send({name: _has_tools(name) for name in connection.recv()})
    except UsageError as error:
        connection.send(str(error))
    os._exit(0)


def _has_tools(name: str) -> bool:
    factory = load_factory(name)
    try:
        environment = factory()
        missing = [m for m in ("reset", "step", "restore", "close") if not callable(getattr(environment, m, None))]
        if missing or not isinstance(getattr(environment, "tools", None), list):
            raise TypeError(f"{type(environment).__name__} lacks {', '.join(missing) or 'tools'} of the protocol")
        return bool(environment.tools)
    except UsageError as error:  # a package that is missing
        raise UsageError(f"--environment {name}: {error}") from None
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--environment {name}: cannot be made: {reason}") from None


if __name__ == "__main__":
    main()
