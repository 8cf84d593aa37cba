"""Scores of next-token distributions: log-probability, entropy and Σπ² in training, likely tokens, and the rollout's.

In training a vocabulary is split over tensor-parallel ranks, and logits are computed chunk by chunk (`head`). Those of
a small micro-batch are kept for backward; others are recomputed. Forward runs two collectives (a maximum, and the
stacked sums), per chunk on a CPU, for all chunks on CUDA; backward none. The rollout's log-probs, from gathered logits,
have the same bits on a CPU.
Shapes: T tokens, n of them scored; H channels, V columns of the padded vocabulary, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.kernels import linear, native, with_gradient
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.head import (
    MAX_KEPT,
    PADDED_LOGIT,
    Head,
    HeadGradients,
    HeadOptions,
    at_least_fp32,
    column_of,
    row_chunks,
    softmax_statistics,
)

MAX_TOGETHER = 2**28  # elements of gradients of logits that are multiplied together on CUDA: 512 MiB in 16 bits


class HeadScores(NamedTuple):
    """Log-probability of each target, entropy (nats) and Σπ² of each distribution; all [n]."""

    logprobs: Tensor
    entropy: Tensor
    square_sum: Tensor | None  # None: not requested


def _logits_grad(
    weights: Tensor, in_place: bool, total: Tensor, entropy: Tensor, square_sum: Tensor | None, grads
) -> Tensor:
    """Returns the gradient [C, V/tp] of scaled logits, without the 1_y term, from `weights` = e^(logit − maximum).

    ∂ log p_y/∂x = 1_y − p, ∂H/∂x = −p (log p + H), ∂Σπ²/∂x = 2p (p − Σπ²). Other arguments are [C, 1]; `grads` are
    those of the three outputs, None for an unused output. `in_place`: the weights may be overwritten.
    """
    grad_logprob, grad_entropy, grad_square = (0.0 if grad is None else grad for grad in grads)
    if grads[1] is None and grads[2] is None:
        return torch.mul(weights, -grad_logprob / total, out=weights if in_place else None)
    p = torch.div(weights, total, out=weights if in_place else None)
    constant = grad_logprob + grad_entropy * entropy + (0.0 if grads[2] is None else 2 * grad_square * square_sum)
    # p · (−g_H log p + 2 g_S p − (g_y + g_H H + 2 g_S Σπ²)); at p = 0 any finite log gives the product 0
    if grads[1] is None:
        bracket = p.mul(2 * grad_square).sub_(constant)
    else:
        bracket = p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(-grad_entropy).sub_(constant)
        if grads[2] is not None:
            bracket.addcmul_(p, 2 * grad_square)  # type: ignore[arg-type]  # a tensor here
    return bracket.mul_(p)


def _scores_gradient(ctx, *grads):
    """Needs no collective: the saved statistics cover the whole vocabulary, and each rank has its own columns.

    The caller sums the gradients of hidden states over the ranks, once for all chunks.
    """
    hidden, weight, targets, indices, kept, top, total, entropy, square_sum = ctx.saved_tensors
    head = Head(hidden, weight, targets, indices, ctx.options)
    gradients = HeadGradients(head, *ctx.needs_input_grad[:2])
    if head.has_row_kernels:
        statistics = torch.stack([top, total, entropy, torch.zeros_like(top) if square_sum is None else square_sum])
        for rows, grad in _gradients_by_rows(head, statistics, grads):
            gradients.add_products(rows, grad)
        return *gradients.returned(), *[None] * 4
    for rows in row_chunks(len(head.targets), len(weight)):
        weights, slope = None if kept is None else kept[rows], None
        if weights is None:
            weights = head.scaled_logits(rows)
            slope = head.softcap_slope(weights, rows)
            if native.supports(weights):
                native.ops.softmax_sums(weights, top[rows], weights, 1)
            else:
                weights.sub_(column_of(top, rows)).exp_()
        columns = [None if x is None else column_of(x, rows) for x in (total, entropy, square_sum, *grads)]
        grad = _logits_grad(weights, kept is None, *columns[:3], columns[3:])
        if columns[3] is not None:  # the 1_y term
            places, here = head.columns(rows)
            grad.scatter_add_(-1, places, columns[3] * here)
        gradients.add(rows, grad, slope)
        del grad, weights, slope  # before the next chunk's logits
    return *gradients.returned(), *[None] * 4


@with_gradient(_scores_gradient)
def _scores(ctx, hidden, weight, targets, indices, squares, options):
    """(hidden [T, H], weight [V/tp, H], …) -> logprobs, entropy, Σπ², each [n]; does not modify its inputs.

    It saves for backward its inputs, a few numbers per token, and e^logits if these are small.
    """
    ctx.set_materialize_grads(False)
    head = Head(hidden, weight, targets, indices, options)
    count, dtype = len(targets), at_least_fp32(hidden)
    needs_grad, kept = any(ctx.needs_input_grad[:2]), None
    if head.has_row_kernels:
        results = head.statistics_by_rows(squares)
    else:
        if needs_grad and head.options.softcap is None and count * len(weight) <= MAX_KEPT:
            kept = hidden.new_empty(count, len(weight), dtype=dtype)
        results = [hidden.new_empty(count, dtype=dtype) for _ in range(4 + squares)]
        for rows in row_chunks(count, len(weight)):
            weights = None if kept is None else kept[rows]
            for result, statistic in zip(results, head.statistics(rows, weights, squares), strict=True):
                result[rows] = statistic
    top, total, logprobs, entropy, *square_sum = results
    square_sum = square_sum[0] if squares else None
    ctx.save_for_backward(hidden, weight, targets, indices, kept, top, total, entropy, square_sum)
    ctx.options = options
    return logprobs, entropy, square_sum


def _gradients_by_rows(head: Head, statistics: Tensor, grads) -> Iterator[tuple[slice, Tensor]]:
    """Yields the logits' gradient [C', V/tp] of several chunks together, in the hidden states' type.

    The product with them reads and writes the whole fp32 gradient of the weight, which takes longer than the product
    itself for few rows. `statistics` [4, n], as `head_gradient` takes them; `grads`: of the outputs, or None.
    """
    from megarl.mcore.kernels.cuda.head_rows import head_gradient  # needs Triton

    given = torch.stack([torch.zeros_like(statistics[0]) if grad is None else grad for grad in grads])
    chunks, columns = row_chunks(len(head.targets), len(head.weight)), len(head.weight)
    together = max(MAX_TOGETHER // columns // max(chunks[0].stop, 1), 1)
    for first in range(0, len(chunks), together):
        group = chunks[first : first + together]
        whole = slice(group[0].start, group[-1].stop)
        grad = head.hidden.new_empty(whole.stop - whole.start, columns)
        for rows in group:
            out = grad[rows.start - whole.start : rows.stop - whole.start]
            head_gradient(out, head.logits(rows), *head.row_arguments(rows), statistics[:, rows], given[:, rows])
        yield whole, grad


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, indices=None, squares: bool = True
) -> HeadScores:
    """Returns scores of next-token distributions, differentiable once in `hidden` and `weight`.

    Args:
        hidden: [T, H] hidden states, equal on all ranks of the group; under sequence parallelism this rank's [T/tp, H].
        weight: [V/tp, H], this rank's rows of the output weights; rank r holds tokens r·V/tp … (r+1)·V/tp − 1.
        targets: [n] int64 tokens to score, below the vocabulary's size.
        indices: [n] int64, distinct, n at least `MIN_ROWS`: the hidden state of each target; None: n = T, in order.
        squares: whether to compute Σπ²; two more passes over the logits.

    Returns:
        HeadScores in float32 (float64 for float64 hidden states), equal on all ranks of the group.

    Raises:
        ValueError: targets or temperatures do not match the indices (or hidden states) in number.
    """
    hidden, temperature = linear.to_all_ranks(hidden, options.group, options.sequence_parallel), options.temperature
    total = len(hidden if indices is None else indices)
    sizes = [tuple(x.shape) for x in (targets, temperature) if isinstance(x, Tensor)]
    if any(size != (total,) for size in sizes):
        raise ValueError(f"{total} hidden states, but targets and temperatures of shape {sizes}")
    if total < MIN_ROWS:
        missing = MIN_ROWS - total
        hidden, targets = pad(hidden, (0, 0, 0, missing)), pad(targets, (0, missing))
        if isinstance(temperature, Tensor):
            options = options._replace(temperature=pad(temperature, (0, missing), value=1.0))
    scores = _scores(hidden, weight, targets, indices, squares, options)
    return HeadScores(*(None if score is None else score[:total] for score in scores))


# -- likely tokens, and the rollout's ------------------------------------------------------------------------------


def head_top_logprobs(hidden: Tensor, weight: Tensor, count: int, options: HeadOptions) -> tuple[Tensor, Tensor]:
    """Returns (tokens [T, k] int64, log-probs [T, k]) of next-token distributions, most likely first.

    On a CPU a log-prob has the bits that `head_scores` gives the token. Without gradients.

    Args:
        count: k is this, or the vocabulary's size if that is smaller.
        hidden, weight, options: as of `head_scores`, with one temperature.
    """
    group, options = options.group, options._replace(is_exact=False)
    if options.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    total, count = len(hidden), min(count, options.vocab_size)
    hidden = pad(hidden, (0, 0, 0, max(MIN_ROWS - total, 0)))
    unused = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    head = Head(hidden, weight, unused, None, options)
    found = []
    for rows in row_chunks(len(hidden), len(weight)):
        logits = head.scaled_logits(rows)
        values, tokens = logits.topk(min(count, len(weight)), dim=-1)
        top, sums, *_ = softmax_statistics(logits, *head.columns(rows), group, None, False)
        values, tokens = _best_of_ranks(values, tokens + head.first, count, group)
        found.append((tokens, values - top.unsqueeze(-1) - sums.log().unsqueeze(-1)))
    tokens, logprobs = torch.cat([tokens for tokens, _ in found]), torch.cat([logprobs for _, logprobs in found])
    return tokens[:total], logprobs[:total]


def _best_of_ranks(values: Tensor, tokens: Tensor, count: int, group) -> tuple[Tensor, Tensor]:
    """The largest `count` values of all ranks, and their tokens; both [C, k] on each rank."""
    if dist.get_world_size(group) == 1:
        return values, tokens
    values, tokens = (linear.gather_tokens(x.t(), group).t() for x in (values, tokens))
    values, places = values.topk(count, dim=-1)
    return values, tokens.gather(-1, places)


class GatheredPolicy:
    """Computes log-probabilities from gathered logits [n, V], summed as over `tensor_ranks` tensor-parallel ranks.

    On a CPU it runs the same operations in the same order as `head_scores`, so that rollout log-probs equal those that
    training recomputes to the last bit. It does not modify its inputs.
    """

    def __init__(self, logits: Tensor, temperature: float, vocab_size: int, tensor_ranks: int):
        """`vocab_size`: the tokenizer's; columns from it on are padding."""
        scaled, self.vocab_size = logits.to(at_least_fp32(logits)), vocab_size
        self.scaled = scaled if temperature == 1.0 else scaled / temperature
        self.top = self.scaled[:, :vocab_size].amax(-1, keepdim=True)
        # [n, V]: e^(logit − largest logit), 0 in padded columns
        if native.supports(self.scaled):
            self.weights = self.scaled.clone(memory_format=torch.contiguous_format)
            self.weights[:, vocab_size:] = PADDED_LOGIT
            shares = self.weights.view(len(logits) * tensor_ranks, -1)
            tops = self.top.expand(-1, tensor_ranks).flatten().contiguous()  # one row is flattened to a view
            totals = native.ops.softmax_sums(shares, tops, shares, 1)[0].view(-1, tensor_ranks)
        else:
            self.weights = (self.scaled - self.top).exp_()
            self.weights[:, vocab_size:] = 0.0
            totals = self.weights.unflatten(-1, (tensor_ranks, -1)).sum(-1)
        self.log_total = totals.sum(-1).log()

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Returns [n] log-probabilities of one token per row [n]."""
        chosen = self.scaled.gather(-1, tokens.unsqueeze(-1)) - self.top
        return chosen.squeeze(-1) - self.log_total

    def top_logprobs(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the `count` most likely tokens of each row and their log-probabilities, both [n, ≤ count]."""
        vocab_size = min(self.scaled.shape[-1], self.vocab_size)
        logits, tokens = self.scaled[:, :vocab_size].topk(min(count, vocab_size), dim=-1)
        return tokens, logits - self.top - self.log_total.unsqueeze(-1)
