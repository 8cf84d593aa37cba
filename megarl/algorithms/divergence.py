"""Divergences between a student's and a teacher's distribution over the vocabulary, and their gradients.

With P_T the teacher, P_S the student, and the mixture M = βP_T + (1−β)P_S:
forward KL(P_T‖P_S), reverse KL(P_S‖P_T), and the generalized JSD = β·KL(P_T‖M) + (1−β)·KL(P_S‖M) (GKD, 2306.13649).

All functions take log-probs [n, v] of a part of the vocabulary: its columns on this rank. The caller adds up the sums
over the ranks. Where both distributions are equal, every term is exactly 0, and so is the gradient.
"""

from typing import NamedTuple

from megarl.deferred import Tensor, torch

FORWARD, REVERSE, JSD = DIVERGENCES = ("forward", "reverse", "jsd")


class Divergence(NamedTuple):
    """One of `DIVERGENCES`, with β of the mixture."""

    name: str
    beta: float = 0.5  # of `JSD`, 0 < β < 1


def log_mixture_ratio(difference: Tensor, beta: float) -> Tensor:
    """log(M / the larger of P_S and P_T) from log P_T − log P_S, without overflow, exactly 0 at 0.

    Therefore log(M/P_S) = this + max(difference, 0), and log(M/P_T) = this + max(−difference, 0).
    """
    share = torch.where(difference > 0, 1 - beta, beta)
    return difference.abs().neg_().expm1_().mul_(share).log1p_()


def divergence_sums(student: Tensor, teacher: Tensor, divergence: Divergence) -> Tensor:
    """This part's summands of forward KL, reverse KL and, for `JSD`, of JSD and KL(P_S‖M): [2 or 4, n]."""
    difference = teacher - student
    p_teacher, p_student = teacher.exp(), student.exp()
    sums = [(p_teacher * difference).sum(-1), (p_student * difference).sum(-1).neg_()]
    if divergence.name == JSD:
        ratio = log_mixture_ratio(difference, divergence.beta)
        to_student = p_student.mul_(ratio + difference.clamp(min=0)).sum(-1).neg_()
        to_teacher = p_teacher.mul_(ratio.sub_(difference.clamp_(max=0))).sum(-1).neg_()
        sums += [divergence.beta * to_teacher + (1 - divergence.beta) * to_student, to_student]
    return torch.stack(sums)


def value_of(sums: Tensor, divergence: Divergence) -> Tensor:
    """[n] the divergence from its sums over the whole vocabulary."""
    return sums[DIVERGENCES.index(divergence.name)]


def center_of(sums: Tensor, divergence: Divergence) -> Tensor:
    """[n] what `logit_gradient` needs to know of the whole vocabulary."""
    return sums[3] if divergence.name == JSD else sums[1]


def logit_gradient(student: Tensor, teacher: Tensor, center: Tensor, divergence: Divergence) -> Tensor:
    """∂D/∂x [n, v] in the student's scaled logits x: P_S ⊙ (g − E_{P_S}[g]).

    g = −P_T/P_S for forward KL, log(P_S/P_T) for reverse KL, (1−β)·log(P_S/M) for JSD. Forward KL gives P_S − P_T.
    """
    if divergence.name == FORWARD:
        return student.exp() - teacher.exp()
    difference, scale = teacher - student, -1.0
    if divergence.name == JSD:
        ratio = log_mixture_ratio(difference, divergence.beta)
        difference, scale = ratio.add_(difference.clamp_(min=0)), divergence.beta - 1
    return difference.add_(center.unsqueeze(-1)).mul_(student.exp()).mul_(scale)
