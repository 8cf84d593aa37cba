"""Log-probability, entropy and Σπ² over a vocabulary that is split over tensor-parallel ranks, chunk by chunk.

Hidden states meet the output weights for one chunk of tokens at a time. What backward needs of the logits is kept
where a micro-batch's are small, and else computed again: the full [T, V] logits of a large one are never alive. Two
collectives a chunk in forward (a maximum, and the sums packed together), none in backward.
Shapes: T tokens, of which n are scored, H channels, V columns of the padded vocabulary, C tokens of a chunk.
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
from torch.nn.functional import pad

from megarl.mcore.kernels import linear
from megarl.mcore.kernels.batch_invariance import MIN_ROWS

PADDED_LOGIT = -1e30  # logit of a padded column; finite: 0 · (−1e30) in the entropy is 0, not NaN

# Elements of a chunk's logits [C, V/tp], of which two fp32 buffers are alive: a sixteenth of what the whole would
# need, but no smaller than a matrix product wants to be and no larger than memory should be asked for.
CHUNKS = 16
SMALLEST_CHUNK, LARGEST_CHUNK = 2**20, 2**26
LARGEST_KEPT = 2**25  # elements of logits [n, V/tp] of a micro-batch that stay from forward to backward: 128 MiB


class HeadScores(NamedTuple):
    """Three [n] tensors: log-probability of each target, entropy (nats) and Σπ² of each distribution."""

    logprobs: Tensor
    entropy: Tensor
    square_sum: Tensor | None  # None: not asked for


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Cuts n = `rows` (at least `LEAST_ROWS`) evenly; no part has fewer than `LEAST_ROWS`, it would round differently.

    Args:
        columns: V/tp, of which a part may have about `LARGEST_CHUNK` elements together with its rows.
    """
    budget = min(max(rows * columns // CHUNKS, SMALLEST_CHUNK), LARGEST_CHUNK)
    most = max(budget // columns, MIN_ROWS)
    count = min(-(-rows // most), rows // MIN_ROWS)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _at(values, rows: slice):
    """[T] -> column [C, 1] of a chunk; a number stays one for all tokens."""
    return values[rows].unsqueeze(-1) if isinstance(values, Tensor) else values


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Head(NamedTuple):
    """What turns a chunk's hidden states into scores: this rank's output columns, from index `first` on."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V/tp, H]
    targets: Tensor  # [n]
    places: Tensor | None  # [n] of the scored tokens; None: all are
    temperature: float | Tensor  # one, or [n]
    first: int
    vocab_size: int

    def inputs(self, rows: slice) -> Tensor:
        """[C, H] hidden states of a chunk."""
        return self.hidden[rows] if self.places is None else self.hidden.index_select(0, self.places[rows])

    def scaled_logits(self, rows: slice) -> Tensor:
        """[C, V/tp] in at least fp32, a buffer of its own."""
        logits = linear.matmul(self.inputs(rows), self.weight)
        logits = logits.to(_at_least_fp32(logits))
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            logits.div_(_at(self.temperature, rows))
        logits[:, max(self.vocab_size - self.first, 0) :] = PADDED_LOGIT
        return logits

    def columns(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Columns of the targets and whether they are this rank's, both [C, 1]; column 0 where they are not."""
        local = self.targets[rows].unsqueeze(-1) - self.first
        here = (local >= 0) & (local < len(self.weight))
        return local.masked_fill(~here, 0), here


def _statistics(logits: Tensor, columns: Tensor, here: Tensor, group, weights: Tensor | None, squares: bool):
    """(Maximum, Σe, log p(target), entropy[, Σπ²]), each [C]; logits [C, V/tp] are overwritten.

    `weights` takes e^(logit − maximum), if there is room.
    """
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits.sub_(top.unsqueeze(-1))
    chosen = shifted.gather(-1, columns).masked_fill(~here, 0.0).squeeze(-1)
    weights = torch.exp(shifted, out=weights)
    sums = [weights.sum(-1), chosen, shifted.mul_(weights).sum(-1)]
    if squares:
        sums.append(torch.mul(weights, weights, out=shifted).sum(-1))
    sums = torch.stack(sums)
    dist.all_reduce(sums, group=group)
    total, chosen, weighted, *square = sums
    log_total = total.log()
    entropy = log_total - weighted / total
    return top, total, chosen - log_total, entropy, *(each / total.square() for each in square)


def _pull(weights: Tensor, is_own: bool, total: Tensor, entropy: Tensor, square_sum: Tensor | None, grads) -> Tensor:
    """Gradient [C, V/tp] with respect to scaled logits, but for the target's own, from e^(logit − maximum).

    ∂ log p_y/∂x = 1_y − p, ∂H/∂x = −p (log p + H), ∂Σπ²/∂x = 2p (p − Σπ²). The rest is [C, 1]; `grads` are those of
    the three outputs, None where nobody used one. `is_own`: the weights may be overwritten.
    """
    to_logprob, to_entropy, to_square = (0.0 if grad is None else grad for grad in grads)
    if grads[1] is None and grads[2] is None:
        return torch.mul(weights, -to_logprob / total, out=weights if is_own else None)
    p = torch.div(weights, total, out=weights if is_own else None)
    constant = to_logprob + to_entropy * entropy + (0.0 if grads[2] is None else 2 * to_square * square_sum)
    # p · (−g_H log p + 2 g_S p − (g_y + g_H H + 2 g_S Σπ²)); where p is 0 a finite log is as good as −∞
    if grads[1] is None:
        bracket = p.mul(2 * to_square).sub_(constant)
    else:
        bracket = p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(-to_entropy).sub_(constant)
        if grads[2] is not None:
            bracket.addcmul_(p, 2 * to_square)
    return bracket.mul_(p)


class _HeadScores(torch.autograd.Function):
    """(hidden [T, H], weight [V/tp, H], …) -> logprobs, entropy, Σπ², each [n]; writes to nothing of the caller's.

    Between forward and backward it keeps its inputs, a few numbers a token, and e^logits where these are few.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, places, temperature, vocab_size, group, squares):
        """Arguments as in `head_scores`, hidden states already whole; `squares`: whether Σπ² is asked for."""
        ctx.set_materialize_grads(False)
        head = _Head(hidden, weight, targets, places, temperature, dist.get_rank(group) * len(weight), vocab_size)
        count, dtype = len(targets), _at_least_fp32(hidden)
        results = [hidden.new_empty(count, dtype=dtype) for _ in range(4 + squares)]
        learns, kept = any(ctx.needs_input_grad[:2]), None
        if learns and count * len(weight) <= LARGEST_KEPT:
            kept = hidden.new_empty(count, len(weight), dtype=dtype)
        for rows in row_chunks(count, len(weight)):
            room = None if kept is None else kept[rows]
            statistics = _statistics(head.scaled_logits(rows), *head.columns(rows), group, room, squares)
            for result, part in zip(results, statistics, strict=True):
                result[rows] = part
        top, total, logprobs, entropy, *square_sum = results
        square_sum = square_sum[0] if squares else None
        ctx.save_for_backward(hidden, weight, targets, places, kept, top, total, entropy, square_sum)
        ctx.rest = head[4:]
        return logprobs, entropy, square_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        """No collective: the saved statistics are those of the whole vocabulary, and each rank has its own columns.

        What the ranks' columns pull at the hidden states is summed outside, once for all chunks.
        """
        *inputs, kept, top, total, entropy, square_sum = ctx.saved_tensors
        head = _Head(*inputs, *ctx.rest)
        hidden, weight = head.hidden, head.weight
        make = torch.empty_like if head.places is None else torch.zeros_like
        to_hidden = make(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=_at_least_fp32(weight)) if ctx.needs_input_grad[1] else None
        for rows in row_chunks(len(head.targets), len(weight)):
            weights = head.scaled_logits(rows).sub_(_at(top, rows)).exp_() if kept is None else kept[rows]
            here = [None if x is None else _at(x, rows) for x in (total, entropy, square_sum, *grads)]
            _add_chunk(to_hidden, to_weight, head, rows, _pull(weights, kept is None, *here[:3], here[3:]), here[3])
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), *[None] * 6


def _add_chunk(to_hidden, to_weight, head: _Head, rows: slice, grad: Tensor, to_logprob: Tensor | None):
    """Takes a chunk's gradient [C, V/tp], but for its targets' own, to its rows of `to_hidden` and to `to_weight`."""
    if to_logprob is not None:
        columns, here = head.columns(rows)
        grad.scatter_add_(-1, columns, to_logprob * here)
    if isinstance(head.temperature, Tensor) or head.temperature != 1.0:
        grad.div_(_at(head.temperature, rows))
    grad = grad.to(head.hidden.dtype)
    if to_hidden is not None:
        to_hidden[rows if head.places is None else head.places[rows]] = linear.input_gradient(grad, head.weight)
    if to_weight is None:
        return
    if to_weight.dtype == grad.dtype:
        to_weight.addmm_(grad.T, head.inputs(rows))  # no second buffer of the weights' size
    else:
        to_weight.add_(grad.T @ head.inputs(rows))


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature, vocab_size: int, group, sequence_parallel=False,
    places: Tensor | None = None, squares: bool = True,
) -> HeadScores:  # fmt: skip
    """Scores of a language model's next-token distributions, differentiable in `hidden` and `weight`, once.

    Args:
        hidden: [T, H] hidden states, equal on all ranks of the group; under sequence parallelism this rank's [T/tp, H].
        weight: [V/tp, H], this rank's rows of the output weights; rank r holds tokens r·V/tp … (r+1)·V/tp − 1.
        targets: [n] int64 tokens whose log-probability is asked for, below `vocab_size`.
        temperature: logits are divided by it, as in the rollout; one number, or [n], one for each target.
        vocab_size: the tokenizer's; padded columns do not take part.
        group: the tensor-parallel group.
        places: [n] int64, n at least `LEAST_ROWS`: which hidden state each target is asked of, no two the same one;
            None: n = T, each its own.
        squares: whether Σπ² is wanted; two more passes over the logits.

    Returns:
        HeadScores in float32 (float64 for hidden states in float64), equal on all ranks of the group.

    Raises:
        ValueError: not as many targets or temperatures as places, or hidden states.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    total = len(hidden if places is None else places)
    sizes = [tuple(x.shape) for x in (targets, temperature) if isinstance(x, Tensor)]
    if any(size != (total,) for size in sizes):
        raise ValueError(f"{total} hidden states, but targets and temperatures of shape {sizes}")
    if total < MIN_ROWS:
        missing = MIN_ROWS - total
        hidden, targets = pad(hidden, (0, 0, 0, missing)), pad(targets, (0, missing))
        temperature = pad(temperature, (0, missing), value=1.0) if isinstance(temperature, Tensor) else temperature
    scores = _HeadScores.apply(hidden, weight, targets, places, temperature, vocab_size, group, squares)
    return HeadScores(*(None if score is None else score[:total] for score in scores))


class GatheredPolicy:
    """The policy of gathered logits [n, V], as `parts` tensor-parallel ranks sum it up together.

    The same operations in the same order as in `head_scores`: a rollout that uses it logs the very numbers that
    training recomputes, not numbers that are close to them. It writes to nothing of the caller's.
    """

    def __init__(self, logits: Tensor, temperature: float, vocab_size: int, parts: int):
        """`vocab_size`: the tokenizer's; columns behind it are padding."""
        scaled = logits.to(_at_least_fp32(logits))
        self.scaled = scaled if temperature == 1.0 else scaled / temperature
        self.top = self.scaled[:, :vocab_size].amax(-1, keepdim=True)
        # [n, V]: e^(logit − largest logit), 0 in padded columns
        self.weights = (self.scaled - self.top).exp_()
        self.weights[:, vocab_size:] = 0.0
        self.log_total = self.weights.unflatten(-1, (parts, -1)).sum(-1).sum(-1).log()

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[n] log-probabilities of one token a row [n]."""
        chosen = self.scaled.gather(-1, tokens.unsqueeze(-1)) - self.top
        return chosen.squeeze(-1) - self.log_total
