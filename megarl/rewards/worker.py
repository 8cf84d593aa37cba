"""A worker process of `pool.py`: `python -m megarl.rewards.worker FD`. Reads jobs from that socket, writes outcomes.

It exits when the socket closes or its parent exits, and does not import torch.
"""

import os
from multiprocessing.connection import Connection

from megarl.child_process import parent


def main():
    """Serve until the parent is gone, then exit at once, whatever threads a verifier has left."""
    connection = parent()
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        os._exit(0)


def _serve(connection: Connection):
    """Answer messages: the first holds the options and names of the verifiers, every other one is a Job."""
    options, names = connection.recv()
    verifiers = {}
    try:
        from megarl.rewards.build import build_named_verifiers

        verifiers = build_named_verifiers(options, names)
        answer = "ready"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    while True:
        connection.send(answer)
        job = connection.recv()
        answer = verifiers[job.name].outcomes(job.samples)


if __name__ == "__main__":
    main()
