"""A worker process of `pool.py`: `python -m megarl.rewards.worker`. Reads jobs from its input, writes outcomes.

It ends with its input or with its parent, whichever comes first, and imports no torch.
"""

import ctypes
import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from megarl.rewards.pool import SIZE, pack

_PR_SET_PDEATHSIG = 1


def main():
    """The first message is the options and names of verifiers, every other one a Job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, replies = _take_over_pipes()
    rewards = {}
    try:
        # Only now, so that what the imports print or read cannot disturb the pipes.
        from megarl.rewards.build import build_rewards, import_packages

        options, names = _read(requests)
        import_packages(names)
        rewards = build_rewards(options, names)
        answer = "ready"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    while True:
        replies.write(pack(answer))
        replies.flush()
        job = _read(requests)
        answer = rewards[job.name].outcomes(job.samples)


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Input and output as private files: what verifiers and their processes print goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: BinaryIO) -> Any:
    """The next message; at the end of the input the process ends, whatever threads a verifier has left."""
    size = requests.read(SIZE.size)
    if len(size) < SIZE.size:
        os._exit(0)
    return pickle.loads(requests.read(SIZE.unpack(size)[0]))


if __name__ == "__main__":
    main()
