"""Recurrent states at ends of whole blocks, which later prompts that begin alike continue.

A block of the cache has keys and values of its tokens, but a state is of all tokens before it. A state is as large as
the keys and values of thousands of tokens, so it is kept only where it is wanted: at the end of the last whole block of
each prompt that some token follows. Other responses to the prompt, and the next turn of its episode, continue there.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable


class StateSnapshots:
    """Which slot of the states holds the one after a block, by the hash of all tokens up to the block's end.

    The host's bookkeeping alone: it decides the same on all ranks of a replica.
    """

    def __init__(self, slots: range):
        """`slots`: numbers of the states that no request has."""
        self._slots = slots
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._kept

    def clear(self):
        """Drops all snapshots, which may be of older weights."""
        self._kept: OrderedDict[int, int] = OrderedDict()  # the first was not used for the longest time
        self._free = list(reversed(self._slots))

    def use(self, block_hash: int) -> int:
        """Returns the slot of a snapshot that is there."""
        self._kept.move_to_end(block_hash)
        return self._kept[block_hash]

    def take(self, block_hash: int, pinned: Collection[int]) -> int | None:
        """Returns a slot for a new snapshot, that of the oldest one if none is free; None if all slots are `pinned`."""
        if not self._free:
            oldest = next((kept for kept, slot in self._kept.items() if slot not in pinned), None)
            if oldest is None:
                return None
            self.drop([oldest])
        self._kept[block_hash] = slot = self._free.pop()
        return slot

    def drop(self, hashes: Iterable[int]):
        """Frees the slots of blocks that leave the cache."""
        self._free += [self._kept.pop(block_hash) for block_hash in hashes if block_hash in self._kept]
