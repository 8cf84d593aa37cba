"""Log-probability, entropy and Σπ² over a vocabulary that is split over tensor-parallel ranks, chunk by chunk.

Hidden states meet the output weights for one chunk of tokens at a time, and again in backward: the full [T, V] logits
of a micro-batch are never alive. Two collectives a chunk in forward (a maximum, and four sums packed together), none
in backward. Shapes: T tokens, H channels, V columns of the padded vocabulary, C tokens of a chunk.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from megarl.mcore.packing import LEAST_ROWS

PADDING = -1e30  # logit of a padded column; finite: 0 · (−1e30) in the entropy is 0, not NaN

# Elements of a chunk's logits [C, V/tp], of which two fp32 buffers are alive: a sixteenth of what the whole would
# need, but no smaller than a matrix product wants to be and no larger than memory should be asked for.
CHUNKS = 16
SMALLEST_CHUNK, LARGEST_CHUNK = 2**22, 2**26


class HeadScores(NamedTuple):
    """Three [T] tensors: log-probability of each target, entropy (nats) and Σπ² of each distribution."""

    logprobs: Tensor
    entropy: Tensor
    square_sum: Tensor


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Cuts T = `rows` (at least `LEAST_ROWS`) evenly; no part has fewer than `LEAST_ROWS`, it would round differently.

    Args:
        columns: V/tp, of which a part may have about `LARGEST_CHUNK` elements together with its rows.
    """
    budget = min(max(rows * columns // CHUNKS, SMALLEST_CHUNK), LARGEST_CHUNK)
    most = max(budget // columns, LEAST_ROWS)
    count = min(-(-rows // most), rows // LEAST_ROWS)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _at(values, rows: slice):
    """[T] -> column [C, 1] of a chunk; a number stays one for all tokens."""
    return values[rows].unsqueeze(-1) if isinstance(values, Tensor) else values


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Head(NamedTuple):
    """What turns a chunk's hidden states into scores: this rank's output columns, from index `first` on."""

    weight: Tensor  # [V/tp, H]
    targets: Tensor  # [T]
    temperature: float | Tensor  # one, or [T]
    first: int
    vocab_size: int

    def scaled_logits(self, hidden: Tensor, rows: slice) -> Tensor:
        """[C, V/tp] in at least fp32, a buffer of its own; its padded columns are not masked yet."""
        logits = linear(hidden[rows], self.weight)
        return logits.to(_at_least_fp32(logits)).div_(_at(self.temperature, rows))

    def padded(self, columns: Tensor) -> Tensor:
        """Of [C, V/tp] the columns behind the tokenizer's vocabulary, a view."""
        return columns[:, max(self.vocab_size - self.first, 0) :]

    def places(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Columns of the targets and whether they are this rank's, both [C, 1]; column 0 where they are not."""
        local = self.targets[rows].unsqueeze(-1) - self.first
        here = (local >= 0) & (local < len(self.weight))
        return local.masked_fill(~here, 0), here


def _statistics(logits: Tensor, places: Tensor, here: Tensor, group) -> tuple[Tensor, ...]:
    """Maximum, log Σe, log p(target), entropy and Σπ², each [C]; logits [C, V/tp] are overwritten."""
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits.sub_(top.unsqueeze(-1))
    chosen = shifted.gather(-1, places).masked_fill(~here, 0.0).squeeze(-1)
    weights = shifted.exp()
    total, weighted = weights.sum(-1), shifted.mul_(weights).sum(-1)
    sums = torch.stack([total, chosen, weighted, weights.square_().sum(-1)])
    dist.all_reduce(sums, group=group)
    total, chosen, weighted, squares = sums
    log_total = total.log()
    return top, log_total, chosen - log_total, log_total - weighted / total, squares / total.square()


def _pull(logp: Tensor, entropy: Tensor, square_sum: Tensor, grads) -> Tensor:
    """Gradient [C, V/tp] with respect to scaled logits, but for the target's own; log p is overwritten.

    ∂ log p_y/∂x = 1_y − p, ∂H/∂x = −p (log p + H), ∂Σπ²/∂x = 2p (p − Σπ²). The rest is [C, 1]; `grads` are those of
    the three outputs, None where nobody used one.
    """
    to_logprob, to_entropy, to_square = (0.0 if grad is None else grad for grad in grads)
    if grads[1] is None and grads[2] is None:
        return logp.exp_().mul_(-to_logprob)
    p = logp.exp()
    # p · (−g_H log p + 2 g_S p − (g_y + g_H H + 2 g_S Σπ²)), two buffers in all
    bracket = logp.mul_(-to_entropy).sub_(to_logprob + to_entropy * entropy + 2 * to_square * square_sum)
    if grads[2] is not None:
        bracket.addcmul_(p, 2 * to_square)
    return bracket.mul_(p)


class _HeadScores(torch.autograd.Function):
    """(hidden [T, H], weight [V/tp, H], …) -> logprobs, entropy, Σπ², each [T]; writes to nothing of the caller's.

    Between forward and backward it keeps its inputs and four numbers a token.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_size, group):
        """Arguments as in `head_scores`, hidden states already whole."""
        ctx.set_materialize_grads(False)
        head = _Head(weight, targets, temperature, dist.get_rank(group) * len(weight), vocab_size)
        results = [hidden.new_empty(len(hidden), dtype=_at_least_fp32(hidden)) for _ in range(5)]
        for rows in row_chunks(len(hidden), len(weight)):
            logits = head.scaled_logits(hidden, rows)
            head.padded(logits).fill_(PADDING)
            for result, part in zip(results, _statistics(logits, *head.places(rows), group), strict=True):
                result[rows] = part
        top, log_total, logprobs, entropy, square_sum = results
        ctx.save_for_backward(hidden, weight, targets, top, log_total, entropy, square_sum)
        ctx.rest = head[2:]
        return logprobs, entropy, square_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        """No collective: the saved statistics are those of the whole vocabulary, and each rank has its own columns.

        What the ranks' columns pull at the hidden states is summed outside, once for all chunks.
        """
        hidden, weight, targets, *saved = ctx.saved_tensors
        head = _Head(weight, targets, *ctx.rest)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=_at_least_fp32(weight)) if ctx.needs_input_grad[1] else None
        for rows in row_chunks(len(hidden), len(weight)):
            _add_chunk(to_hidden, to_weight, head, hidden, rows, saved, grads)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None


def _add_chunk(to_hidden, to_weight, head: _Head, hidden: Tensor, rows: slice, saved, grads):
    """Recomputes a chunk's logits; writes its rows of `to_hidden` and adds to `to_weight`, where they are wanted."""
    top, log_total, entropy, square_sum = (_at(statistic, rows) for statistic in saved)
    grads = [_at(grad, rows) for grad in grads]
    logp = head.scaled_logits(hidden, rows).sub_(top).sub_(log_total)
    grad = _pull(logp, entropy, square_sum, grads)
    if grads[0] is not None:
        places, here = head.places(rows)
        grad.scatter_add_(-1, places, grads[0] * here)
    head.padded(grad).zero_()
    grad = grad.div_(_at(head.temperature, rows)).to(hidden.dtype)
    if to_hidden is not None:
        torch.mm(grad, head.weight, out=to_hidden[rows])
    if to_weight is None:
        return
    if to_weight.dtype == grad.dtype:
        to_weight.addmm_(grad.T, hidden[rows])  # no second buffer of the weights' size
    else:
        to_weight.add_(grad.T @ hidden[rows])


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature, vocab_size: int, group, sequence_parallel=False
) -> HeadScores:
    """Scores of a language model's next-token distributions, differentiable in `hidden` and `weight`, once.

    Args:
        hidden: [T, H] hidden states, equal on all ranks of the group; under sequence parallelism this rank's [T/tp, H].
        weight: [V/tp, H], this rank's rows of the output weights; rank r holds tokens r·V/tp … (r+1)·V/tp − 1.
        targets: [T] int64 tokens whose log-probability is asked for, below `vocab_size`.
        temperature: logits are divided by it, as in the rollout; one number, or [T], one for each token.
        vocab_size: the tokenizer's; padded columns do not take part.
        group: the tensor-parallel group.

    Returns:
        HeadScores in float32 (float64 for hidden states in float64), equal on all ranks of the group.

    Raises:
        ValueError: not as many targets or temperatures as hidden states.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    total = len(hidden)
    sizes = [tuple(x.shape) for x in (targets, temperature) if isinstance(x, Tensor)]
    if any(size != (total,) for size in sizes):
        raise ValueError(f"{total} hidden states, but targets and temperatures of shape {sizes}")
    if total < LEAST_ROWS:
        missing = LEAST_ROWS - total
        hidden, targets = pad(hidden, (0, 0, 0, missing)), pad(targets, (0, missing))
        temperature = pad(temperature, (0, missing), value=1.0) if isinstance(temperature, Tensor) else temperature
    scores = _HeadScores.apply(hidden, weight, targets, temperature, vocab_size, group)
    return HeadScores(*(score[:total] for score in scores))


def mask_padding(logits: Tensor, vocab_size: int, first: int) -> Tensor:
    """Takes the columns behind the tokenizer's vocabulary out of the distribution (padding for divisibility)."""
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    return logits.masked_fill(columns >= vocab_size, PADDING)


def gathered_logprobs(logits: Tensor, parts: int) -> Tensor:
    """Log-probabilities of all tokens from gathered logits [C, V], summed as `parts` tensor-parallel ranks sum.

    The same operations in the same order as in `head_scores`: a rollout that uses it logs the very numbers that
    training recomputes, not numbers that are close to them.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    total = shifted.exp().unflatten(-1, (parts, -1)).sum(-1).sum(-1)
    return shifted - total.log().unsqueeze(-1)
