"""Stop strings in the engine: where the text of each response is, and which drawn tokens complete one."""

from collections.abc import Callable, Sequence

from megarl.data.stop_strings import StopMatcher


class StopStates:
    """The responses of an engine's requests, as far as they were followed. Requests that no stop string ends are not
    in it."""

    def __init__(self, drawn_since: Callable[[int, int], Sequence[int]]):
        """`drawn_since`: (request id, n) -> tokens that the request drew in earlier steps, without the first n."""
        self._drawn_since = drawn_since
        # By request id: what follows it, how many drawn tokens were followed, and where its text is then.
        self._places: dict[int, tuple[StopMatcher, int, bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def begin(self, request_id: int, matcher: StopMatcher, written: Sequence[int]):
        """Adds a request; `written`: tokens of its response that are part of its prompt."""
        place = matcher.START
        for token in written:
            place, _ = matcher.follow(place, token)
        self._places[request_id] = matcher, 0, place

    def finish(self, request_id: int):
        self._places.pop(request_id, None)

    def clear(self):
        self._places.clear()

    def have_ended(self, request_id: int, tokens: Sequence[int]) -> bool:
        """Whether the last of all tokens that a request drew completes a stop string."""
        if request_id not in self._places:
            return False
        matcher, count, place = self._places[request_id]
        is_complete = False
        for token in tokens[count:]:
            place, is_complete = matcher.follow(place, token)
        return is_complete

    def completes(self, tokens: Sequence[int], request_ids: Sequence[int]) -> list[bool]:
        """Whether each drawn token completes a stop string.

        Tokens of one request that follow each other are drafted ones: each comes after those before it.
        """
        found, last, place, matcher = [], -1, None, None
        for token, request_id in zip(tokens, request_ids, strict=True):
            if request_id not in self._places:
                found.append(False)
                continue
            if request_id != last:
                last, (matcher, place) = request_id, self._advance(request_id)
            assert matcher is not None  # set with the first token of each request
            place, is_complete = matcher.follow(place, int(token))
            found.append(is_complete)
        return found

    def _advance(self, request_id: int) -> tuple[StopMatcher, bytes]:
        """StopMatcher what the request drew in earlier steps; returns what follows it, and where its text is."""
        matcher, count, place = self._places[request_id]
        for token in self._drawn_since(request_id, count):
            place, _ = matcher.follow(place, int(token))
            count += 1
        self._places[request_id] = matcher, count, place
        return matcher, place
