"""What ends a response, and what it gets without a choice of the policy.

Megatron's engine compares each sampled token with a single one per request; here a request has any number of end
tokens, and stop strings. Forced tokens end the thoughts of a response after a budget. They take the places of tokens
that were drawn, with log-prob 0. All else of a step is as it is: so the cache, drafts, routes and random numbers of
later positions are those of a policy that has drawn them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.data.detokenizer import StopMatcher
from megarl.tool_formats.thinking_budget import ThinkingBudget

NO_TOKEN = -1  # an id that is never sampled
_NEVER = 2**62  # a position that no response reaches


class StopStates:
    """The responses of an engine's requests that stop strings may end, as far as they were followed."""

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
        """Whether each drawn token completes a stop string. Tokens of one request that follow each other are drafted
        ones: each comes after those before it."""
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
        """Follows what the request drew in earlier steps; returns what follows it, and where its text is."""
        matcher, count, place = self._places[request_id]
        for token in self._drawn_since(request_id, count):
            place, _ = matcher.follow(place, int(token))
            count += 1
        self._places[request_id] = matcher, count, place
        return matcher, place


class ForcedTokens:
    """The requests of an engine that may get forced tokens."""

    def __init__(self, drawn_since: Callable[[int, int], Sequence[int]], max_requests: int):
        """`drawn_since`: (request id, n) -> tokens that the request drew in earlier steps, without the first n."""
        self._drawn_since = drawn_since
        # By request id: positions at which forced tokens begin and end.
        self._begins, self._ends = torch.full((2, max_requests), _NEVER, dtype=torch.int64)
        self._requests: dict[int, tuple[ThinkingBudget, Sequence[int], int]] = {}  # rule, prompt, start of the response
        self._is_due: dict[int, bool] = {}  # of requests that have reached the place

    def __bool__(self) -> bool:
        return bool(self._requests)

    def begin(self, request_id: int, rule: ThinkingBudget, prompt: Sequence[int], start: int):
        """Adds a request; `start`: where its response begins in its prompt, which ends with what was written before."""
        self._requests[request_id] = rule, prompt, start
        self._begins[request_id] = start + rule.limit
        self._ends[request_id] = start + rule.limit + len(rule.tokens)

    def finish(self, request_id: int):
        if self._requests.pop(request_id, None) is not None:
            self._is_due.pop(request_id, None)
            self._begins[request_id] = self._ends[request_id] = _NEVER

    def are_forced(self, request_ids: Tensor, positions: Tensor) -> Tensor:
        """[n] bool: whether requests [n] get forced tokens at positions [n], before which all is known (`room`)."""
        ids = request_ids.long()
        found = (positions >= self._begins[ids]) & (positions < self._ends[ids])
        for row in found.nonzero().flatten().tolist():
            found[row] = self._decide(int(ids[row]))
        return found

    def force(self, drawn: Tensor, logprobs: Tensor, request_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn tokens [n] and their log-probs [n] with the forced ones in their places."""
        rows = self.are_forced(request_ids, positions).nonzero().flatten().tolist()
        if rows:
            drawn, logprobs = drawn.clone(), logprobs.clone()
        for row in rows:
            request_id = int(request_ids[row])
            rule, _, start = self._requests[request_id]
            drawn[row], logprobs[row] = rule.tokens[int(positions[row]) - start - rule.limit], 0.0
        return drawn, logprobs

    def room(self, request_ids: Tensor, lengths: Tensor) -> Tensor:
        """[n] drafted tokens that requests [n] with sequences of `lengths` [n] may have, so that all tokens before the
        place are known when the one there is drawn."""
        left = self._begins[request_ids.long()] - lengths
        return torch.where(left > 0, left - 1, _NEVER)

    def _decide(self, request_id: int) -> bool:
        if request_id not in self._is_due:
            rule, prompt, start = self._requests[request_id]
            response = [*prompt[start:], *map(int, self._drawn_since(request_id, 0))]
            self._is_due[request_id] = bool(rule.forced(prompt[:start], response))
            if not self._is_due[request_id]:
                self._begins[request_id] = self._ends[request_id] = _NEVER
        return self._is_due[request_id]


class EndTokens:
    """The ids that end a response; may be none. A request may have its own ones instead. Stop strings end it, too."""

    def __init__(self, ids: tuple[int, ...], stops: StopStates):
        self.ids, self.stops = frozenset(ids), stops
        self.forced: ForcedTokens | None = None  # end nothing
        self._tensor = torch.tensor(sorted(ids), dtype=torch.int64)
        self._own: dict[int, frozenset[int]] = {}  # by request id

    def set_own(self, request_id: int, ids: tuple[int, ...] | None):
        """Gives a request its own end tokens; None: the common ones."""
        self._own.pop(request_id, None)
        if ids is not None and frozenset(ids) != self.ids:
            self._own[request_id] = frozenset(ids)

    def clear(self):
        """Forgets the own ones of all requests."""
        self._own.clear()
        self.stops.clear()

    def of(self, request_id: int) -> frozenset[int]:
        """The end tokens of a request."""
        return self._own.get(request_id, self.ids)

    def contains(self, tokens: Tensor, request_ids: Tensor, positions: Tensor) -> Tensor:
        """Whether tokens [n] on the host end their requests; `request_ids` [n], `positions` [n] in their sequences."""
        if not self._own:
            found = torch.isin(tokens, self._tensor)
        else:
            pairs = zip(tokens.tolist(), request_ids.tolist(), strict=True)
            found = torch.tensor([token in self.of(request_id) for token, request_id in pairs], dtype=torch.bool)
        if self.stops:
            found |= torch.tensor(self.stops.completes(tokens.tolist(), request_ids.tolist()), dtype=torch.bool)
        return found & ~self.forced.are_forced(request_ids, positions) if self.forced else found

    def have_ended(self, request_id: int, tokens: list[int]) -> bool:
        """Whether one of them, or a stop string, has ended a response of these tokens."""
        if not tokens or tokens[-1] in self.of(request_id):
            return bool(tokens)
        return self.stops.have_ended(request_id, tokens)
