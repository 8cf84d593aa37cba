"""Makes environments once: `python -m megarl.environments.check NAME …` prints "tools" or "none" for each.

On an error it prints one line and exits with status 2. What environments print goes to stderr.
"""

import os
import sys

from megarl.environments.loading import load_factory
from megarl.errors import UsageError


def main():
    """Checks the environments of the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        try:
            has_tools = _has_tools(name)
        except UsageError as error:
            print(error, file=answers, flush=True)
            os._exit(2)
        print("tools" if has_tools else "none", file=answers, flush=True)
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
