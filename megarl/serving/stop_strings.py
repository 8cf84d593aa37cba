"""Cuts a text that comes in pieces at stop strings."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a text that comes in pieces at the first stop string.

    The first to be complete counts; of those complete at the same character, the longest. Holds text back while it may
    be the beginning of a stop string. `matched` is the stop string that was found, or None; `consumed` is where it
    ended in the last text that `feed` got.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops, self._include = set(stops), include
        self._max_held = max(map(len, stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None
        self.consumed = 0

    def feed(self, text: str) -> str:
        """The text that is certain now; nothing after a stop string."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        ends = [(start + len(stop), -len(stop), stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if ends:
            end, _, self.matched = min(ends)
            self.consumed, self._held = end - len(self._held), ""
            return pending[: end if self._include else end - len(self.matched)]
        held = pending[max(0, len(pending) - self._max_held) :]
        while held and not any(stop.startswith(held) for stop in self._stops):
            held = held[1:]
        self._held = held
        return pending[: len(pending) - len(held)]

    def finish(self) -> str:
        """The text held back, when none follows."""
        held, self._held = self._held, ""
        return held
