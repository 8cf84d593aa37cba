"""Tokens that a response gets without a choice of the policy: those that end its thoughts after a budget.

They take the places of tokens that were drawn, with log-prob 0. All else of a step is as it is: so the cache, drafts,
routes and random numbers of later positions are those of a policy that has drawn them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.tool_formats.thinking_budget import ThinkingBudget

_NEVER = 2**62  # a position that no response reaches


class ForcedTokens:
    """The requests of an engine that may get such tokens."""

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
        """[n] bool: whether requests [n] get forced tokens at positions [n] of their sequences, before which nothing
        is unknown or drafted (`room`)."""
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
