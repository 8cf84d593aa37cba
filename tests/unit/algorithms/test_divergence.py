"""Divergences of a teacher from full distributions, and their gradients by autograd, from parts of the vocabulary."""

import pytest
import torch

from megarl.algorithms.divergence import (
    DIVERGENCES,
    Divergence,
    center_of,
    divergence_sums,
    log_mixture_ratio,
    logit_gradient,
    value_of,
)

VOCAB = 11
KINDS = [Divergence("forward"), Divergence("reverse"), *(Divergence("jsd", beta) for beta in (0.1, 0.5, 0.9))]


def expected(logits: torch.Tensor, teacher: torch.Tensor, divergence: Divergence) -> torch.Tensor:
    """[n] by definition, from the student's logits and the teacher's log-probs."""
    student = logits.log_softmax(-1)
    mixture = (divergence.beta * teacher.exp() + (1 - divergence.beta) * student.exp()).log()

    def kl(one, other):
        return (one.exp() * (one - other)).sum(-1)

    jsd = divergence.beta * kl(teacher, mixture) + (1 - divergence.beta) * kl(student, mixture)
    return {"forward": kl(teacher, student), "reverse": kl(student, teacher), "jsd": jsd}[divergence.name]


@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_values_and_gradients_are_those_of_the_definition(divergence):
    generator = torch.Generator().manual_seed(1)
    logits, of_teacher = (3 * torch.randn(5, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    student, teacher = logits.log_softmax(-1), of_teacher.log_softmax(-1)
    parts = [(student[:, at], teacher[:, at]) for at in (slice(0, 4), slice(4, VOCAB))]  # of two ranks
    sums = sum(divergence_sums(one.clone(), other.clone(), divergence) for one, other in parts)
    logits.requires_grad_()
    wanted = expected(logits, teacher, divergence)
    torch.testing.assert_close(value_of(sums, divergence), wanted.detach(), rtol=1e-6, atol=1e-9)  # β in float32
    wanted.sum().backward()
    center = center_of(sums, divergence)
    found = [logit_gradient(one.clone(), other.clone(), center, divergence) for one, other in parts]
    torch.testing.assert_close(torch.cat(found, 1), logits.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_equal_distributions_have_exactly_none(divergence):
    same = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    sums = divergence_sums(same.clone(), same.clone(), divergence)
    assert not sums.any() and not logit_gradient(same.clone(), same.clone(), sums[1], divergence).any()
    assert divergence.name in DIVERGENCES


def test_the_mixture_of_far_distributions_is_finite():
    difference = torch.tensor([-900.0, 0.0, 900.0])
    assert log_mixture_ratio(difference, 0.25).tolist() == pytest.approx([-0.2876821, 0.0, -1.3862944])
