"""Log-probability, entropy and Σπ² over a vocabulary split over tensor-parallel ranks, chunk by chunk.

Logits are computed for one chunk of tokens at a time. Those of a small micro-batch are kept for backward; others are
recomputed, so the full [T, V] logits of a large micro-batch never exist. Forward runs two collectives per chunk (a
maximum, and the stacked sums), backward none.
Shapes: T tokens, n of them scored; H channels, V columns of the padded vocabulary, C tokens of a chunk.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megarl.mcore.kernels import linear, native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.parallel.collectives import all_reduce

PADDED_LOGIT = -1e30  # logit of a padded column; finite, because 0 · −∞ in the entropy would be NaN

# A chunk's logits [C, V/tp], which need two fp32 buffers, have 1/16 of the elements of all logits, within limits that
# keep matrix products efficient and memory bounded.
CHUNKS = 16
MIN_CHUNK, MAX_CHUNK = 2**20, 2**26
MAX_TOGETHER = 2**28  # elements of gradients of logits that are multiplied together on CUDA: 512 MiB in 16 bits
MAX_KEPT = 2**26  # elements of logits [n, V/tp] that a micro-batch keeps for backward: 256 MiB


class HeadScores(NamedTuple):
    """Log-probability of each target, entropy (nats) and Σπ² of each distribution; all [n]."""

    logprobs: Tensor
    entropy: Tensor
    square_sum: Tensor | None  # None: not requested


def row_chunks(rows: int, columns: int, share: int = 1) -> list[slice]:
    """Splits n = `rows` (at least `MIN_ROWS`) evenly into chunks of at least `MIN_ROWS`: fewer would round differently.

    Args:
        columns: V/tp; a chunk has at most about `MAX_CHUNK` elements, rows times columns.
        share: chunks are this many times smaller, for a caller that needs as many more buffers.
    """
    budget = min(max(rows * columns // CHUNKS, MIN_CHUNK), MAX_CHUNK) // share
    chunk_rows = max(budget // columns, MIN_ROWS)
    count = min(-(-rows // chunk_rows), rows // MIN_ROWS)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _column(values, rows: slice):
    """Tensor [n] -> column [C, 1] of a chunk; a number is returned as it is."""
    return values[rows].unsqueeze(-1) if isinstance(values, Tensor) else values


def at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def softcap_(logits: Tensor, softcap: float) -> Tensor:
    """Replaces logits by softcap · tanh(logits / softcap) (Gemma 2, 2408.00118 §2), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap)


@dataclass(frozen=True)
class Head:
    """Inputs of the head on this rank; those without a comment are as of `head_scores`."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V/tp, H]
    targets: Tensor  # [n]
    indices: Tensor | None  # [n] indices of the scored tokens; None: all tokens
    temperature: float | Tensor  # a number, or [n]
    vocab_size: int
    group: dist.ProcessGroup
    softcap: float | None
    is_exact: bool

    @functools.cached_property
    def first(self) -> int:
        """Index of this rank's first column in the vocabulary."""
        return dist.get_rank(self.group) * len(self.weight)

    @functools.cached_property
    def product(self) -> Callable[[Tensor], Tensor]:
        """The product with the weight."""
        return linear.logits_with(self.weight, self.is_exact)

    def inputs(self, rows: slice) -> Tensor:
        """Returns [C, H] hidden states of a chunk."""
        return self.hidden[rows] if self.indices is None else self.hidden.index_select(0, self.indices[rows])

    def logits(self, rows: slice) -> Tensor:
        """Returns [C, V/tp] logits in a new buffer, with a softcap in at least fp32."""
        logits = self.product(self.inputs(rows))
        return logits if self.softcap is None else softcap_(logits.to(at_least_fp32(logits)), self.softcap)

    def scaled_logits(self, rows: slice, logits: Tensor | None = None) -> Tensor:
        """Returns [C, V/tp] logits over temperature in at least fp32, in a new buffer or in that of `logits`."""
        logits = self.logits(rows) if logits is None else logits
        logits = logits.to(at_least_fp32(logits))
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            logits.div_(_column(self.temperature, rows))
        logits[:, max(self.vocab_size - self.first, 0) :].fill_(PADDED_LOGIT)
        return logits

    def statistics(self, rows: slice, weights: Tensor | None, squares: bool) -> list[Tensor]:
        """`softmax_statistics` of a chunk, with the rollout's own log-probs if it is exact."""
        logits = self.logits(rows)
        exact = self._row_logprobs(logits, rows) if self.is_exact else None
        if self.has_row_kernels:
            found = self._statistics_by_rows(logits, rows, squares)
        else:
            scaled, columns = self.scaled_logits(rows, logits), self.columns(rows)
            found = list(softmax_statistics(scaled, *columns, self.group, weights, squares))
        found[2] = found[2] if exact is None else exact
        return found

    def _statistics_by_rows(self, logits: Tensor, rows: slice, squares: bool) -> list[Tensor]:
        """As `softmax_statistics`, by one pass over the logits."""
        from megarl.mcore.kernels.cuda.head_rows import head_sums  # needs Triton

        own = head_sums(logits, *self.row_arguments(rows))
        top = own[0].clone()
        all_reduce(top, self.group, dist.ReduceOp.MAX)
        drop = (own[0] - top).masked_fill(own[0].isneginf(), 0.0)  # −∞: this rank has no token of the vocabulary
        factor, (_, here) = drop.exp(), self.columns(rows)
        sums = torch.stack([
            factor * own[1], (own[4] - top).masked_fill(~here.squeeze(-1), 0.0), factor * (own[2] + drop * own[1]),
            factor.square() * own[3],
        ])  # fmt: skip
        all_reduce(sums, self.group)
        return [top, *_scores(*sums[: 3 + squares])]

    def _row_logprobs(self, logits: Tensor, rows: slice) -> Tensor:
        from megarl.mcore.kernels.cuda.row_sampling import row_logprobs  # needs Triton

        return row_logprobs(logits, self.targets[rows], float(self.temperature), self.vocab_size)

    def softcap_slope(self, scaled: Tensor, rows: slice) -> Tensor | None:
        """Returns the softcap's derivative from scaled logits [C, V/tp]; None without a softcap."""
        if self.softcap is None:
            return None
        tanh = (scaled * _column(self.temperature, rows)).div_(self.softcap).clamp_(-1, 1)  # −1 in padded columns
        return tanh.square_().neg_().add_(1)

    @property
    def has_row_kernels(self) -> bool:
        """Whether kernels of a row each compute statistics and gradients: on CUDA, without a softcap."""
        return self.hidden.is_cuda and self.softcap is None and self.hidden.dtype is not torch.float64

    def row_arguments(self, rows: slice) -> tuple[Tensor | None, float, Tensor, int]:
        """(temperatures or None, temperature, columns of the targets, tokens of this rank), for kernels of rows."""
        count = min(max(self.vocab_size - self.first, 0), len(self.weight))
        targets = self.targets[rows] - self.first
        if isinstance(self.temperature, Tensor):
            return self.temperature[rows].float(), 1.0, targets, count
        return None, float(self.temperature), targets, count

    def columns(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the targets' columns (0 if on another rank) and whether this rank has them, both [C, 1]."""
        local = self.targets[rows].unsqueeze(-1) - self.first
        here = (local >= 0) & (local < len(self.weight))
        return local.masked_fill(~here, 0), here


def softmax_statistics(logits: Tensor, columns: Tensor, here: Tensor, group, weights: Tensor | None, squares: bool):
    """Returns (maximum, Σe, log p(target), entropy[, Σπ²]), each [C]; overwrites the logits [C, V/tp].

    `weights` receives e^(logit − maximum) if it is not None.
    """
    top = logits.amax(-1)
    all_reduce(top, group, dist.ReduceOp.MAX)
    chosen = logits.gather(-1, columns).sub_(top.unsqueeze(-1)).masked_fill(~here, 0.0).squeeze(-1)
    if native.supports(logits):
        out = logits if weights is None else weights
        total, weighted, *square = native.ops.softmax_sums(logits, top, out, 2 + squares)
    else:
        shifted = logits.sub_(top.unsqueeze(-1))
        weights = torch.exp(shifted, out=weights)
        total, weighted = weights.sum(-1), shifted.mul_(weights).sum(-1)
        square = [torch.mul(weights, weights, out=shifted).sum(-1)] if squares else []
    sums = torch.stack([total, chosen, weighted, *square])
    all_reduce(sums, group)
    return top, *_scores(*sums)


def _scores(total: Tensor, chosen: Tensor, weighted: Tensor, *square: Tensor) -> tuple[Tensor, ...]:
    """Σe^s, log p(target), entropy[, Σπ²] from Σe^s, the target's s, Σ e^s · s[, Σe^2s], s = logit − maximum."""
    log_total = total.log()
    entropy = log_total - weighted / total
    return total, chosen - log_total, entropy, *(each / total.square() for each in square)


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


class _HeadScores(torch.autograd.Function):
    """(hidden [T, H], weight [V/tp, H], …) -> logprobs, entropy, Σπ², each [n]; does not modify its inputs.

    It saves for backward its inputs, a few numbers per token, and e^logits if these are small.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, indices, squares, *options):
        """Arguments as in `head_scores`; hidden states are already gathered. `options`: the last fields of `Head`."""
        ctx.set_materialize_grads(False)
        head = Head(hidden, weight, targets, indices, *options)
        count, dtype = len(targets), at_least_fp32(hidden)
        results = [hidden.new_empty(count, dtype=dtype) for _ in range(4 + squares)]
        needs_grad, kept = any(ctx.needs_input_grad[:2]), None
        is_kept = head.softcap is None and not head.has_row_kernels and count * len(weight) <= MAX_KEPT
        if needs_grad and is_kept:
            kept = hidden.new_empty(count, len(weight), dtype=dtype)
        for rows in row_chunks(count, len(weight)):
            weights = None if kept is None else kept[rows]
            for result, statistic in zip(results, head.statistics(rows, weights, squares), strict=True):
                result[rows] = statistic
        top, total, logprobs, entropy, *square_sum = results
        square_sum = square_sum[0] if squares else None
        ctx.save_for_backward(hidden, weight, targets, indices, kept, top, total, entropy, square_sum)
        ctx.options = options
        return logprobs, entropy, square_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        """Needs no collective: the saved statistics cover the whole vocabulary, and each rank has its own columns.

        The caller sums the gradients of hidden states over the ranks, once for all chunks.
        """
        hidden, weight, targets, indices, kept, top, total, entropy, square_sum = ctx.saved_tensors
        head = Head(hidden, weight, targets, indices, *ctx.options)
        gradients = HeadGradients(head, *ctx.needs_input_grad[:2])
        if head.has_row_kernels:
            statistics = torch.stack([top, total, entropy, torch.zeros_like(top) if square_sum is None else square_sum])
            for rows, grad in _gradients_by_rows(head, statistics, grads):
                gradients.add_products(rows, grad)
            return *gradients.returned(), *[None] * 8
        for rows in row_chunks(len(head.targets), len(weight)):
            weights, slope = None if kept is None else kept[rows], None
            if weights is None:
                weights = head.scaled_logits(rows)
                slope = head.softcap_slope(weights, rows)
                if native.supports(weights):
                    native.ops.softmax_sums(weights, top[rows], weights, 1)
                else:
                    weights.sub_(_column(top, rows)).exp_()
            columns = [None if x is None else _column(x, rows) for x in (total, entropy, square_sum, *grads)]
            gradients.add(  # nested calls, so that no name keeps the logits' gradient during the next chunk
                rows, _with_target(_logits_grad(weights, kept is None, *columns[:3], columns[3:]), columns[3],
                                   *head.columns(rows)), slope,
            )  # fmt: skip
        return *gradients.returned(), *[None] * 8


def _with_target(grad: Tensor, grad_logprob: Tensor | None, columns: Tensor, here: Tensor) -> Tensor:
    """Adds the 1_y term to a chunk's gradient [C, V/tp], in place."""
    return grad if grad_logprob is None else grad.scatter_add_(-1, columns, grad_logprob * here)


class HeadGradients:
    """Gradients of a head's hidden states and weight, summed chunk by chunk."""

    def __init__(self, head: Head, needs_hidden: bool, needs_weight: bool):
        self.head, weight = head, head.weight
        allocate = torch.empty_like if head.indices is None else torch.zeros_like
        self.grad_hidden = allocate(head.hidden) if needs_hidden else None
        self.grad_weight, self._adds = None, linear.adds_to_main_grad(weight)
        if needs_weight:
            self.grad_weight = weight.main_grad if self._adds else weight.new_zeros(
                weight.shape, dtype=at_least_fp32(weight)
            )  # fmt: skip

    def add(self, rows: slice, grad: Tensor, slope: Tensor | None):
        """Adds a chunk's gradient [C, V/tp] of scaled logits, which it overwrites; `slope`: of the softcap."""
        if isinstance(self.head.temperature, Tensor) or self.head.temperature != 1.0:
            grad.div_(_column(self.head.temperature, rows))
        if slope is not None:
            grad.mul_(slope)
        self.add_products(rows, grad.to(self.head.hidden.dtype))

    def add_products(self, rows: slice, grad: Tensor):
        """Adds the gradient [C, V/tp] of logits, in the hidden states' type."""
        head = self.head
        if self.grad_hidden is not None:
            at = rows if head.indices is None else head.indices[rows]
            self.grad_hidden[at] = linear.input_gradient(grad, head.weight)
        if self.grad_weight is not None:
            linear.add_weight_gradient(self.grad_weight, grad, head.inputs(rows))

    def returned(self) -> tuple[Tensor | None, Tensor | None]:
        """What autograd gets for both; a stand-in for a weight's gradient that was added to Megatron's buffer."""
        grad_weight, weight = self.grad_weight, self.head.weight
        if grad_weight is not None:
            grad_weight = linear.stand_in(weight) if self._adds else grad_weight.to(weight.dtype)
        return self.grad_hidden, grad_weight


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
            arguments = head.row_arguments(rows)
            head_gradient(out, head.logits(rows), *arguments, statistics[:, rows].contiguous(),
                          given[:, rows].contiguous())  # fmt: skip
        yield whole, grad


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature, vocab_size: int, group, sequence_parallel=False,
    indices: Tensor | None = None, squares: bool = True, softcap: float | None = None, is_exact: bool = False,
) -> HeadScores:  # fmt: skip
    """Returns scores of next-token distributions, differentiable once in `hidden` and `weight`.

    Args:
        hidden: [T, H] hidden states, equal on all ranks of the group; under sequence parallelism this rank's [T/tp, H].
        weight: [V/tp, H], this rank's rows of the output weights; rank r holds tokens r·V/tp … (r+1)·V/tp − 1.
        targets: [n] int64 tokens to score, below `vocab_size`.
        temperature: divides the logits, as in the rollout; a number, or [n], one per target.
        vocab_size: the tokenizer's; padded columns are excluded.
        group: the tensor-parallel group.
        sequence_parallel: whether the hidden states are split over the group.
        indices: [n] int64, distinct, n at least `MIN_ROWS`: the hidden state of each target; None: n = T, in order.
        squares: whether to compute Σπ²; two more passes over the logits.
        softcap: c of logits c · tanh(logit / c); None: the logits stay as they are.
        is_exact: compute logits and log-probs as an exact rollout does on CUDA; for a group of one rank, and one
            temperature.

    Returns:
        HeadScores in float32 (float64 for float64 hidden states), equal on all ranks of the group.

    Raises:
        ValueError: targets or temperatures do not match the indices (or hidden states) in number.
    """
    hidden = linear.to_all_ranks(hidden, group, sequence_parallel)
    total = len(hidden if indices is None else indices)
    sizes = [tuple(x.shape) for x in (targets, temperature) if isinstance(x, Tensor)]
    if any(size != (total,) for size in sizes):
        raise ValueError(f"{total} hidden states, but targets and temperatures of shape {sizes}")
    if total < MIN_ROWS:
        missing = MIN_ROWS - total
        hidden, targets = pad(hidden, (0, 0, 0, missing)), pad(targets, (0, missing))
        temperature = pad(temperature, (0, missing), value=1.0) if isinstance(temperature, Tensor) else temperature
    options = temperature, vocab_size, group, softcap, is_exact
    scores = _HeadScores.apply(hidden, weight, targets, indices, squares, *options)
    return HeadScores(*(None if score is None else score[:total] for score in scores))
