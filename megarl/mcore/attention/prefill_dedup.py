"""Deduplicated prefills: prompts that are equal within a step of the rollout engine are computed once.

Unlike a shared prefix, which one sequence of a packed micro-batch holds for others, equal prompts are deduplicated as a
whole.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.batch import expand_ranges
from megarl.mcore.kernels.batch_invariance import MIN_ROWS


class PrefillDedup(NamedTuple):
    """Deduplicated prefills of a step: equal prompts, such as those of a group's samples, are computed once."""

    requests: Tensor  # [N'] int64 requests that are computed
    kept_tokens: Tensor  # [T'] int64 indices of their tokens and of padding
    inverse: Tensor  # [T] int64 index among the kept tokens of each token of the step


def deduplicate_prefills(tokens: Tensor, queries: Tensor, keys: Tensor) -> PrefillDedup | None:
    """Finds equal prompts; returns None if no two are equal, or if fewer than `MIN_ROWS` tokens would remain.

    Args:
        tokens: [T] new tokens of the step and its padding, on the host.
        queries, keys: [N] as in `plan_cache_reads`; only requests without cached keys are compared.
    """
    starts, is_uncached = queries.cumsum(0) - queries, queries == keys
    ids, first_requests = tokens.tolist(), {}  # prompt -> the first request with it
    bounds = zip(starts.tolist(), queries.tolist(), is_uncached.tolist(), strict=True)
    prompts = [tuple(ids[a : a + n]) if uncached else i for i, (a, n, uncached) in enumerate(bounds)]
    originals = torch.tensor([first_requests.setdefault(prompt, i) for i, prompt in enumerate(prompts)])
    requests = originals.unique()
    sizes, padding = queries[requests], torch.arange(int(queries.sum()), len(tokens))
    remaining = int(sizes.sum())
    if len(requests) == len(queries) or remaining + len(padding) < MIN_ROWS:
        return None
    kept_starts = (sizes.cumsum(0) - sizes)[torch.searchsorted(requests, originals)]
    kept = torch.cat([expand_ranges(starts[requests], sizes), padding])
    source = torch.cat([expand_ranges(kept_starts, queries), remaining + torch.arange(len(padding))])
    return PrefillDedup(requests, kept, source)
