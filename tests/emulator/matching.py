"""Whether the ranks of a group call the same collectives in the same order, and whether sends find their receives.

What a rank calls goes to the group's store before gloo has it, so that the rank that comes later sees the difference.
"""

import json

import operators  # type: ignore[import-not-found]
from torch import Tensor

ENDED = "ends"


class Calls:
    """The calls of one rank in one group.

    Raises:
        RuntimeError: a rank has called something else; the message names both ranks, both calls and their number.
    """

    def __init__(self, store, rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size
        self.count = 0
        self._exchanges = [0] * size  # by peer; a batch counts as one

    def collective(self, name: str, outs: list[Tensor], inputs: list[Tensor], root: int | None):
        """The next collective; all ranks have the same type of data, number of elements and root."""
        self._next_collective(_described(name, outs, inputs, root))

    def _next_collective(self, call: str):
        self.count += 1
        if self._size == 1:
            return
        mine = json.dumps([self._rank, call])
        rank, other = json.loads(self._store.compare_set(f"collective {self.count}", "", mine))
        if other != call:
            raise RuntimeError(f"emulator: collective {self.count} of the group: rank {self._rank} {call}, "
                               f"rank {rank} {other}")  # fmt: skip

    def exchange(self, messages: list[tuple[str, Tensor, int]], is_batch: bool) -> list[tuple[int, int, list]]:
        """Sends and receives that NCCL starts as one: (send or recv, tensor, peer). Returns those with a send:
        (number, peer, call)."""
        sent = []
        for peer in sorted({peer for *_, peer in messages}):
            calls = [[f"{x.dtype} × {x.numel()}" for name, x, to in messages if to == peer and name == wanted]
                     for wanted in ("send", "recv")]  # fmt: skip
            number = self._post(peer, [is_batch, *calls])
            if calls[0]:
                sent.append((number, peer, [is_batch, *calls]))
        return sent

    def wait_for_receivers(self, sent: list[tuple[int, int, list]]):
        """Waits for the receivers of what `exchange` returned."""
        for number, peer, call in sent:
            operators.count("host waits for a receiver")
            self._store.wait([self._key(number, peer, peer)])
            self._compare(number, call, peer)

    def _key(self, number: int, peer: int, of: int) -> str:
        return f"exchange {number} of {min(self._rank, peer)} and {max(self._rank, peer)}, rank {of}"

    def _post(self, peer: int, call) -> int:
        self._exchanges[peer] += 1
        number = self._exchanges[peer]
        self._store.set(self._key(number, peer, self._rank), json.dumps(call))
        if self._store.check([self._key(number, peer, peer)]):
            self._compare(number, call, peer)
        return number

    def _compare(self, number: int, call, peer: int):
        other = json.loads(self._store.get(self._key(number, peer, peer)))
        agree = call == other if ENDED in (call, other) else [call[0], call[2], call[1]] == other
        if not agree:
            raise RuntimeError(f"emulator: exchange {number} of the group's ranks {self._rank} and {peer}: "
                               f"rank {self._rank} {_told(call)}, rank {peer} {_told(other)}")  # fmt: skip

    def end(self):
        """No other calls will follow."""
        self._next_collective(ENDED)
        for peer in range(self._size):
            if peer != self._rank:
                self._post(peer, ENDED)

    def leave(self):
        """Of the world's group, at last. The first rank, whose process may have the store, waits for the others."""
        self._store.set(f"end {self._rank}", "")
        if self._rank == 0:
            self._store.wait([f"end {rank}" for rank in range(self._size)])


def _described(name: str, outs: list[Tensor], inputs: list[Tensor], root: int | None) -> str:
    tensors = {"gather": inputs, "scatter": outs}.get(name) or max(outs, inputs, key=_elements)
    words = [f"calls {name}", *sorted({str(x.dtype) for x in tensors})]
    if "all" not in name or "to" not in name:  # whose ranks may send different numbers
        words.append(f"× {_elements(tensors)}")
    return " ".join(words + ([] if root is None else [f"root {root}"]))


def _elements(tensors: list[Tensor]) -> int:
    return sum(x.numel() for x in tensors)


def _told(call) -> str:
    if call == ENDED:
        return call
    is_batch, sends, receives = call
    words = [f"{verb} {', '.join(each)}" for verb, each in (("sends", sends), ("receives", receives)) if each]
    return " and ".join(words) + (" in a batch" if is_batch else "")
