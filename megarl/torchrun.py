"""torchrun for megarl's launcher: the same flags; after a failure the rank's own line is the last one.

torchrun itself would print its own traceback after that of the rank, and end with status 1 whatever the rank's was.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megarl.faults import last_line
from megarl.launcher import how_to_resume


def main(argv: list[str]) -> int:
    """Runs torchrun. Returns the exit status of the rank that failed first; 1 after a signal to torchrun."""
    try:
        run.run(run.parse_args(argv))
    except SignalException:
        return 1
    except ChildFailedError as error:
        found = [last_line.Failure(rank, each.exitcode, each.error_file_data) for rank, each in error.failures.items()]
        last_line.tell(found, how_to_resume)
        cause = last_line.cause(found)
        return cause.exit_status if cause else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
