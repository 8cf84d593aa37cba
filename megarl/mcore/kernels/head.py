"""The output head, over a vocabulary split over tensor-parallel ranks: logits and their softmax, chunk by chunk.

Logits are computed for one chunk of tokens at a time, so the full [T, V] logits of a large micro-batch never exist.
Shapes: T tokens, n of them scored; H channels, V columns of the padded vocabulary, C tokens of a chunk.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.kernels import linear, native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.parallel.process_groups import all_reduce

PADDED_LOGIT = -1e30  # logit of a padded column; finite, because 0 · −∞ in the entropy would be NaN

# A chunk's logits [C, V/tp], which need two fp32 buffers, have 1/16 of the elements of all logits, within limits that
# keep matrix products efficient and memory bounded.
CHUNKS = 16
MIN_CHUNK, MAX_CHUNK = 2**20, 2**26
MAX_KEPT = 2**26  # elements of logits [n, V/tp] that a micro-batch keeps for backward: 256 MiB


class HeadOptions(NamedTuple):
    """How a head's logits become distributions."""

    temperature: float | Tensor  # divides the logits, as in the rollout; a number, or [n], one per target
    vocab_size: int  # the tokenizer's; padded columns are excluded
    group: dist.ProcessGroup  # the tensor-parallel group
    sequence_parallel: bool = False  # whether the hidden states are split over the group
    softcap: float | None = None  # c of logits c · tanh(logit / c); None: the logits stay as they are
    # Logits and log-probs are computed as an exact rollout does on CUDA; for a group of one rank, and one temperature.
    is_exact: bool = False


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


def column_of(values, rows: slice):
    """Tensor [n] -> column [C, 1] of a chunk; a number is returned as it is."""
    return values[rows].unsqueeze(-1) if isinstance(values, Tensor) else values


def at_least_fp32(tensor: Tensor) -> torch.dtype:
    """The tensor's type, or fp32 for 16 bits."""
    return torch.promote_types(tensor.dtype, torch.float32)


def softcap_(logits: Tensor, softcap: float) -> Tensor:
    """Replaces logits by softcap · tanh(logits / softcap) (Gemma 2, 2408.00118 §2), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap)


@dataclass(frozen=True)
class Head:
    """Inputs of the head on this rank."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V/tp, H]
    targets: Tensor  # [n]
    indices: Tensor | None  # [n] indices of the scored tokens; None: all tokens
    options: HeadOptions

    @functools.cached_property
    def first(self) -> int:
        """Index of this rank's first column in the vocabulary."""
        return dist.get_rank(self.options.group) * len(self.weight)

    @functools.cached_property
    def product(self) -> Callable[[Tensor], Tensor]:
        """The product with the weight."""
        return linear.logits_with(self.weight, self.options.is_exact)

    def inputs(self, rows: slice) -> Tensor:
        """Returns [C, H] hidden states of a chunk."""
        if self.has_row_kernels:
            return self._all_inputs[rows]
        return self.hidden[rows] if self.indices is None else self.hidden.index_select(0, self.indices[rows])

    @functools.cached_property
    def _all_inputs(self) -> Tensor:
        """[n, H] hidden states: on CUDA one launch for all chunks is worth their copy."""
        return self.hidden if self.indices is None else self.hidden.index_select(0, self.indices)

    def logits(self, rows: slice) -> Tensor:
        """Returns [C, V/tp] logits in a new buffer, with a softcap in at least fp32."""
        logits, softcap = self.product(self.inputs(rows)), self.options.softcap
        return logits if softcap is None else softcap_(logits.to(at_least_fp32(logits)), softcap)

    def scaled_logits(self, rows: slice, logits: Tensor | None = None) -> Tensor:
        """Returns [C, V/tp] logits over temperature in at least fp32, in a new buffer or in that of `logits`."""
        logits, temperature = self.logits(rows) if logits is None else logits, self.options.temperature
        logits = logits.to(at_least_fp32(logits))
        if isinstance(temperature, Tensor) or temperature != 1.0:
            logits.div_(column_of(temperature, rows))
        logits[:, max(self.options.vocab_size - self.first, 0) :].fill_(PADDED_LOGIT)
        return logits

    def statistics(self, rows: slice, weights: Tensor | None, squares: bool) -> list[Tensor]:
        """`softmax_statistics` of a chunk, with the rollout's own log-probs if it is exact."""
        logits = self.logits(rows)
        exact = self._exact_logprobs(logits, rows) if self.options.is_exact else None
        scaled, (columns, here) = self.scaled_logits(rows, logits), self.columns(rows)
        found = list(softmax_statistics(scaled, columns, here, self.options.group, weights, squares))
        found[2] = found[2] if exact is None else exact
        return found

    def statistics_by_rows(self, squares: bool) -> list[Tensor]:
        """As `statistics`, of all rows: a chunk has two launches, its product and its sums; the rest runs once."""
        from megarl.mcore.kernels.cuda.head_rows import SUMS, head_sums  # needs Triton

        whole = slice(0, len(self.targets))
        own = self.hidden.new_empty(SUMS, whole.stop, dtype=torch.float32)
        exact = self.hidden.new_empty(whole.stop, dtype=torch.float32) if self.options.is_exact else None
        for rows in row_chunks(whole.stop, len(self.weight)):
            logits = self.logits(rows)
            head_sums(own[:, rows], logits, *self.row_arguments(rows))
            if exact is not None:
                exact[rows] = self._exact_logprobs(logits, rows)
        top = own[0].clone()
        all_reduce(top, self.options.group, dist.ReduceOp.MAX)
        drop = (own[0] - top).masked_fill(own[0].isneginf(), 0.0)  # −∞: this rank has no token of the vocabulary
        factor, (_, here) = drop.exp(), self.columns(whole)
        chosen, weighted = (own[4] - top).masked_fill(~here.squeeze(-1), 0.0), factor * (own[2] + drop * own[1])
        sums = torch.stack([factor * own[1], chosen, weighted, factor.square() * own[3]])
        all_reduce(sums, self.options.group)
        found = [top, *_scores(sums[: 3 + squares])]
        found[2] = found[2] if exact is None else exact
        return found

    def _exact_logprobs(self, logits: Tensor, rows: slice) -> Tensor:
        from megarl.mcore.kernels.cuda.head_rows import row_logprobs  # needs Triton

        return row_logprobs(logits, self.targets[rows], float(self.options.temperature), self.options.vocab_size)

    def softcap_slope(self, scaled: Tensor, rows: slice) -> Tensor | None:
        """Returns the softcap's derivative from scaled logits [C, V/tp]; None without a softcap."""
        temperature, softcap = self.options.temperature, self.options.softcap
        if softcap is None:
            return None
        tanh = (scaled * column_of(temperature, rows)).div_(softcap).clamp_(-1, 1)  # −1 in padded columns
        return tanh.square_().neg_().add_(1)

    @property
    def has_row_kernels(self) -> bool:
        """Whether kernels of a row each compute statistics and gradients: on CUDA, without a softcap."""
        return self.hidden.is_cuda and self.options.softcap is None and self.hidden.dtype is not torch.float64

    def row_arguments(self, rows: slice) -> tuple[Tensor | None, float, Tensor, int]:
        """(temperatures or None, temperature, columns of the targets, tokens of this rank), for kernels of rows."""
        temperatures, temperature, targets, count = self._row_arguments
        return None if temperatures is None else temperatures[rows], temperature, targets[rows], count

    @functools.cached_property
    def _row_arguments(self) -> tuple[Tensor | None, float, Tensor, int]:
        count = min(max(self.options.vocab_size - self.first, 0), len(self.weight))
        targets, temperature = self.targets - self.first, self.options.temperature
        if isinstance(temperature, Tensor):
            return temperature.float(), 1.0, targets, count
        return None, float(temperature), targets, count

    def columns(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the targets' columns (0 if on another rank) and whether this rank has them, both [C, 1]."""
        local = self.targets[rows].unsqueeze(-1) - self.first
        here = (local >= 0) & (local < len(self.weight))
        return local.masked_fill(~here, 0), here


def softmax_statistics(logits: Tensor, columns: Tensor, here: Tensor, group, weights: Tensor | None, squares: bool):
    """Returns (maximum, Σe, log p(target), entropy[, Σπ²]), each [C]; overwrites the logits [C, V/tp]. `weights` gets
    e^(logit − maximum)."""
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
    return top, *_scores(sums)


def _scores(sums: Tensor) -> tuple[Tensor, ...]:
    """Σe^s, log p(target), entropy[, Σπ²] from Σe^s, the target's s, Σ e^s · s[, Σe^2s], s = logit − maximum."""
    total, chosen, weighted, *square = sums
    log_total = total.log()
    entropy = log_total - weighted / total
    return total, chosen - log_total, entropy, *(each / total.square() for each in square)


class HeadGradients:
    """Gradients of a head's hidden states and weight, summed chunk by chunk."""

    def __init__(self, head: Head, needs_hidden: bool, needs_weight: bool):
        self.head, weight = head, head.weight
        allocate = torch.empty_like if head.indices is None else torch.zeros_like
        self.grad_hidden = allocate(head.hidden) if needs_hidden else None
        self.grad_weight, self._adds = None, linear.adds_to_main_grad(weight)
        if needs_weight:
            self.grad_weight = (
                weight.main_grad if self._adds else weight.new_zeros(weight.shape, dtype=at_least_fp32(weight))
            )

    def add(self, rows: slice, grad: Tensor, slope: Tensor | None):
        """Adds a chunk's gradient [C, V/tp] of scaled logits, which it overwrites; `slope`: of the softcap."""
        temperature = self.head.options.temperature
        if isinstance(temperature, Tensor) or temperature != 1.0:
            grad.div_(column_of(temperature, rows))
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
