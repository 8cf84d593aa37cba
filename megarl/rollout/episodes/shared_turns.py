"""Turns that the samples of a branch share (`--branch-turns`): one of them is generated, the others take it.

These samples have the random streams of their first turns in common. So they write the same turn to the same prompt, as
long as their environments answer alike, and it need not be computed more than once. What a sample writes does not
depend on that.
"""

from collections.abc import Sequence

from megarl.mcore.inference.generation import Completion, GenerationRequest

Numbered = tuple[int, GenerationRequest]


class SharedTurns:
    """The shared turns of a round, on all ranks of a replica; weights are the same throughout."""

    def __init__(self):
        self.asked = 0  # requests for shared turns
        self.taken = 0  # those of them that have got another one's turn
        self._generated: dict[int, tuple] = {}  # identity of the turn, by the number of the request that gets it first
        self._waiting: dict[tuple, list[int]] = {}  # requests that wait for a turn, by its identity
        self._completions: dict[tuple, Completion] = {}

    def split(self, requests: Sequence[Numbered]) -> tuple[list[Numbered], dict[int, Completion]]:
        """(requests whose turns are to be generated, turns by number that others have got before)."""
        left, found = [], {}
        for number, request in requests:
            if request.trunk is None:
                left.append((number, request))
                continue
            turn = _identity(request)
            self.asked += 1
            self.taken += turn in self._completions or turn in self._waiting
            if turn in self._completions:
                found[number] = self._completions[turn]
            elif turn in self._waiting:
                self._waiting[turn].append(number)
            else:
                self._generated[number], self._waiting[turn] = turn, []
                left.append((number, request))
        return left, found

    def ended(self, number: int, completion: Completion) -> list[int]:
        """Keeps a turn that has been generated, if it is shared; returns the requests that wait for it."""
        turn = self._generated.pop(number, None)
        if turn is None:
            return []
        self._completions[turn] = completion
        return self._waiting.pop(turn)


def _identity(request: GenerationRequest) -> tuple:
    """All that a shared turn of a round depends on."""
    stops = None if request.stops is None else request.stops.stops
    return request.key, tuple(request.prompt), request.max_new_tokens, request.counted_tokens, stops
