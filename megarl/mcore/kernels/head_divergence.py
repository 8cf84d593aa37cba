"""Divergence of a student's next-token distributions from a teacher's, over a vocabulary split over tensor ranks.

Both heads' logits are computed for one chunk of tokens at a time, from the hidden states of both models, so that
neither model's full [T, V] logits ever exist, and no token of the vocabulary is left out. Forward runs three
collectives per chunk (maxima, sums of exponentials, sums of the divergences), backward none.
Shapes: T tokens, n of them scored; H, H_T channels of student and teacher, V columns of the padded vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms.kl import Divergence, center_of, divergence_sums, logit_gradient, value_of
from megarl.mcore.kernels import linear, with_gradient
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.head import MAX_KEPT, Head, HeadGradients, HeadOptions, at_least_fp32, row_chunks
from megarl.mcore.parallel.process_groups import all_reduce

BUFFERS = 3  # times as many buffers of a chunk's size as `head_scores` needs, so chunks are that much smaller


class TeacherHead(NamedTuple):
    """What the student's ranks hold of the teacher's output layer."""

    weight: Tensor  # [V/tp, H_T], the rows of the same tokens as the student's weight on this rank
    temperature: float  # divides its logits
    softcap: float | None  # c of logits c · tanh(logit / c)
    divergence: Divergence


class DistillScores(NamedTuple):
    """Comparison of both distributions at each scored token; all [n]. Only `divergence` is differentiable."""

    divergence: Tensor
    forward_kl: Tensor  # KL(P_T‖P_S), nats
    reverse_kl: Tensor  # KL(P_S‖P_T), nats
    top1_agreement: Tensor  # 1 where both have the same most likely token, else 0
    teacher_logprobs: Tensor  # of the targets


def _log_probs(heads: tuple[Head, Head], rows: slice) -> tuple[list[Tensor], Tensor, Tensor]:
    """Log-probs [C, V/tp] of both heads, their normalizers [2, C], and (agreement, teacher's log-probs) [2, C]."""
    logits, group = [head.scaled_logits(rows) for head in heads], heads[0].options.group
    best = [each.max(-1) for each in logits]
    tops = torch.stack([values for values, _ in best])
    all_reduce(tops, group, dist.ReduceOp.MAX)
    columns, here = heads[1].columns(rows)
    chosen = logits[1].gather(-1, columns).squeeze(-1).sub_(tops[1]).masked_fill(~here.squeeze(-1), 0.0)
    # The student's best token is the teacher's, too; with equally likely ones, the first on each rank counts.
    own = best[0].indices.unsqueeze(-1)
    agrees = (best[0].values == tops[0]) & (logits[1].gather(-1, own).squeeze(-1) == tops[1])
    totals = [each.sub_(top.unsqueeze(-1)).exp().sum(-1) for each, top in zip(logits, tops, strict=True)]
    sums = torch.stack([*totals, chosen, agrees.to(chosen.dtype)])
    all_reduce(sums, group)
    log_totals = sums[:2].log()
    for each, log_total in zip(logits, log_totals, strict=True):
        each.sub_(log_total.unsqueeze(-1))
    return logits, tops + log_totals, torch.stack([sums[3].clamp(max=1), sums[2] - log_totals[1]])


def _divergences_gradient(ctx, grad, *_):
    """Needs no collective; the caller sums the gradients of hidden states over the ranks."""
    hidden, weight, states, targets, indices, kept, own, of_teacher, center = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    heads = _heads(hidden, weight, states, targets, indices, ctx.teacher, ctx.options)
    gradients, column = HeadGradients(heads[0], *ctx.needs_input_grad[:2]), grad.unsqueeze(-1)
    for rows in row_chunks(len(targets), len(weight), BUFFERS):
        if kept is not None:
            gradients.add(rows, kept[rows] * column[rows], None)
            continue
        student, teacher = (head.scaled_logits(rows) for head in heads)
        slope = heads[0].softcap_slope(student, rows)
        student.sub_(own[rows].unsqueeze(-1))
        teacher.sub_(of_teacher[rows].unsqueeze(-1))
        of_chunk = logit_gradient(student, teacher, center[rows], ctx.teacher.divergence)
        gradients.add(rows, of_chunk.mul_(column[rows]), slope)
    return *gradients.returned(), *[None] * 5


@with_gradient(_divergences_gradient)
def _divergences(ctx, hidden, weight, states, targets, indices, teacher, options):
    """(hidden [T, H], weight [V/tp, H], …) -> `DistillScores`; does not modify its inputs.

    It saves for backward its inputs, a few numbers per token, and the gradient of the logits if it is small.
    """
    ctx.set_materialize_grads(False)
    heads = _heads(hidden, weight, states, targets, indices, teacher, options)
    count, divergence, kept = len(targets), teacher.divergence, None
    results = [hidden.new_empty(count, dtype=at_least_fp32(hidden)) for _ in range(8)]
    if any(ctx.needs_input_grad[:2]) and heads[0].options.softcap is None and count * len(weight) <= MAX_KEPT:
        kept = hidden.new_empty(count, len(weight), dtype=results[0].dtype)
    for rows in row_chunks(count, len(weight), BUFFERS):
        logprobs, normalizers, others = _log_probs(heads, rows)
        sums = divergence_sums(logprobs[0], logprobs[1], divergence)
        all_reduce(sums, heads[0].options.group)
        center = center_of(sums, divergence)
        if kept is not None:
            kept[rows] = logit_gradient(logprobs[0], logprobs[1], center, divergence)
        found = value_of(sums, divergence), *sums[:2], *others, *normalizers, center
        for result, values in zip(results, found, strict=True):
            result[rows] = values
    scores = DistillScores(*results[:5])
    ctx.save_for_backward(hidden, weight, states, targets, indices, kept, *results[5:])
    ctx.teacher, ctx.options = teacher, options
    ctx.mark_non_differentiable(*scores[1:])
    return tuple(scores)


def _heads(hidden, weight, states, targets, indices, teacher: TeacherHead, options: HeadOptions) -> tuple[Head, Head]:
    of_teacher = options._replace(temperature=teacher.temperature, softcap=teacher.softcap)
    return Head(hidden, weight, targets, indices, options), Head(states, teacher.weight, targets, None, of_teacher)


def _compared(hidden, weight, states, teacher: TeacherHead, targets, options, indices=None) -> DistillScores:
    """`head_divergence` of hidden states that are already gathered."""
    total = len(hidden if indices is None else indices)
    if (len(states), len(targets), len(teacher.weight)) != (total, total, len(weight)):
        raise ValueError(
            f"{total} hidden states and {len(weight)} rows of the weight, but {len(states)} of the teacher's states, "
            f"{len(targets)} targets and {len(teacher.weight)} rows of its weight"
        )
    if total < MIN_ROWS:
        missing = MIN_ROWS - total
        hidden, states = (pad(x, (0, 0, 0, missing)) for x in (hidden, states))
        targets = pad(targets, (0, missing))
    scores = _divergences(hidden, weight, states, targets, indices, teacher, options)
    return DistillScores(*(score[:total] for score in scores))


# The m tokens that a teacher teaches: their places [m] int64 among the targets, None: all, in order; its hidden states
# [m, H_T] of them, after its final norm; and its head.
Taught = tuple[Tensor | None, Tensor, TeacherHead]


def head_divergence(
    hidden: Tensor, weight: Tensor, taught: Sequence[Taught], targets: Tensor, options: HeadOptions, indices=None
) -> DistillScores:
    """Compares the student's next-token distributions with the teachers', differentiable once in `hidden` and `weight`.

    Args:
        taught: one teacher of all targets, or several: every target has one, and its numbers are those with its teacher
            alone. The same rows on all ranks of the group.
        hidden, weight, targets, options, indices: of the student, as of `head_scores`.

    Returns:
        DistillScores in float32 (float64 for float64 hidden states), equal on all ranks of the group.

    Raises:
        ValueError: as many states as targets are needed, and as many rows of the teacher's weight as of the student's.
    """
    hidden = linear.to_all_ranks(hidden, options.group, options.sequence_parallel)
    rows, states, teacher = taught[0]
    if rows is None:
        return _compared(hidden, weight, states, teacher, targets, options, indices)
    hidden = hidden if indices is None else hidden.index_select(0, indices)
    places = torch.cat([rows for rows, *_ in taught if rows is not None])
    if len(places) != len(hidden):
        raise ValueError(f"{len(hidden)} hidden states, but teachers for {len(places)}")
    scores = [
        _compared(hidden.index_select(0, rows), weight, states, teacher, targets[rows], options)
        for rows, states, teacher in [each for each in taught if len(each[1])] or taught[:1]
    ]
    order = places.argsort()
    fields = range(len(DistillScores._fields))
    return DistillScores._make(torch.cat([each[field] for each in scores]).index_select(0, order) for field in fields)
