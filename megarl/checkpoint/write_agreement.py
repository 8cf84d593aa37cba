"""In which step all ranks complete a checkpoint that they write in the background: agreed upon without a collective.

A collective in each step would make ranks meet that otherwise work at different steps.
"""

from torch.distributed import distributed_c10d

KEY = "megarl/checkpoint"
KEPT = 64  # entries of the last steps; no rank is that many steps after another
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

    def completes(self, step: int, is_written: bool) -> bool:
        """Whether the ranks complete the checkpoint at the end of a step. Every rank asks after every step, in order.

        `is_written`: whether this rank's files are written.
        """
        if is_written and not self._has_written:
            self._store.add(self._written, 1)
            self._has_written = True
        if self._rank == 0 and step > KEPT:
            self._store.delete_key(f"{KEY}/{step - KEPT}")
        answer = _COMPLETE if self._store.add(self._written, 0) == self._size else _WAIT
        return self._store.compare_set(f"{KEY}/{step}", "", answer).decode() == _COMPLETE

    def close(self):
        """Deletes the count of ranks, when the checkpoint is complete on all of them."""
        if self._rank == 0:
            self._store.delete_key(self._written)
