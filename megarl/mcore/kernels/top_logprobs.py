"""The most likely next tokens and their log-probabilities, over a vocabulary split over tensor-parallel ranks."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.linear import gather_tokens
from megarl.mcore.kernels.vocab_parallel_logprobs import Head, row_chunks, softmax_statistics


def head_top_logprobs(
    hidden: Tensor, weight: Tensor, count: int, temperature: float, vocab_size: int, group, sequence_parallel=False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (tokens [T, k] int64, log-probs [T, k]) of next-token distributions, most likely first.

    On a CPU a log-prob has the bits that `head_scores` gives the token. Without gradients.

    Args:
        count: k is this, or the vocabulary's size if that is smaller.
        hidden, weight, temperature, vocab_size, group, sequence_parallel, softcap: as of `head_scores`.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    total, count = len(hidden), min(count, vocab_size)
    hidden = pad(hidden, (0, 0, 0, max(MIN_ROWS - total, 0)))
    unused = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    head = Head(hidden, weight, unused, None, temperature, vocab_size, group, softcap, is_exact=False)
    found = []
    for rows in row_chunks(len(hidden), len(weight)):
        logits = head.scaled_logits(rows)
        values, tokens = logits.topk(min(count, len(weight)), dim=-1)
        top, sums, *_ = softmax_statistics(logits, *head.columns(rows), group, None, False)
        values, tokens = _best_of_ranks(values, tokens + head.first, count, group)
        found.append((tokens, values - top.unsqueeze(-1) - sums.log().unsqueeze(-1)))
    tokens, logprobs = map(torch.cat, zip(*found, strict=True))
    return tokens[:total], logprobs[:total]


def _best_of_ranks(values: Tensor, tokens: Tensor, count: int, group) -> tuple[Tensor, Tensor]:
    """The largest `count` values of all ranks, and their tokens; both [C, k] on each rank."""
    if dist.get_world_size(group) == 1:
        return values, tokens
    values, tokens = (gather_tokens(x.t(), group).t() for x in (values, tokens))
    values, places = values.topk(count, dim=-1)
    return values, tokens.gather(-1, places)
