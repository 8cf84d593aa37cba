"""In which step all ranks complete a checkpoint that they write in the background: agreed upon without a collective.

A collective in each step would make ranks meet that otherwise work at different steps.
"""

from torch.distributed import distributed_c10d

KEY = "megarl/checkpoint"
_COMPLETE, _WAIT = "complete", "wait"


class WriteAgreement:
    """The ranks' answers about one checkpoint.

    The first rank that ends a step writes to the process group's store whether all had written their files by then;
    the others read it when they end the same step.
    """

    def __init__(self, saved: int, rank: int, size: int):
        """`saved`: the checkpoint's step."""
        self._store = distributed_c10d._get_default_store()
        self._rank, self._size = rank, size
        self._written, self._has_written = f"{KEY}/written/{saved}", False
        self._entries = [self._written]  # in the store

    def completes(self, step: int, is_written: bool) -> bool:
        """Whether the ranks complete the checkpoint at the end of a step. Every rank asks after every step, in order.

        `is_written`: whether this rank's files are written.
        """
        if is_written and not self._has_written:
            self._store.add(self._written, 1)
            self._has_written = True
        self._entries.append(f"{KEY}/{step}")
        answer = _COMPLETE if self._store.add(self._written, 0) == self._size else _WAIT
        return self._store.compare_set(self._entries[-1], "", answer).decode() == _COMPLETE

    def close(self):
        """Deletes the entries, when all ranks have completed the checkpoint and so have asked for the last time."""
        for entry in self._entries if self._rank == 0 else ():
            self._store.delete_key(entry)
