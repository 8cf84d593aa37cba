"""KL estimators and controllers: against verl and plain arithmetic. Divergences of a teacher: from full distributions,
and their gradients by autograd, from parts of the vocabulary."""

import json
import math
import random

import pytest
import torch

from megarl.algorithms.kl import (
    DIVERGENCES,
    KL_KINDS,
    Divergence,
    KLController,
    center_of,
    divergence_sums,
    kl_estimate,
    log_mixture_ratio,
    logit_gradient,
    value_of,
)
from tests.references.ragged import CASES, ragged_batches
from tests.references.verl_core_algos import load_verl


def test_estimators_equal_verl():
    kl_penalty = load_verl().core_algos.kl_penalty
    for case, batch in enumerate(ragged_batches()):
        scale = (1e-3, 0.1, 1.0, 10.0, 100.0)[case % 5]
        logprobs, reference = batch.normal(scale), batch.normal(scale)
        for kind in ("k1", "k2"):
            ours = kl_estimate(logprobs, reference, kind)
            torch.testing.assert_close(ours, kl_penalty(logprobs, reference, kind), rtol=1e-12, atol=1e-12)
        ours = kl_estimate(logprobs, reference, "k3", log_ratio_limit=20.0).clamp(-10, 10)  # verl's limits
        torch.testing.assert_close(ours, kl_penalty(logprobs, reference, "k3"), rtol=1e-12, atol=1e-12)


def test_straight_through_forms_equal_verl_in_value_and_gradient():
    kl_penalty = load_verl().core_algos.kl_penalty
    for case, batch in enumerate(ragged_batches()):
        scale = (1e-3, 0.1, 1.0, 10.0, 100.0)[case % 5]
        logprobs, reference = batch.normal(scale).requires_grad_(), batch.normal(scale)
        for kind, limit, value_limit in (("k1+", None, math.inf), ("k3+", 20.0, 10.0)):
            ours, theirs = kl_estimate(logprobs, reference, kind, limit), kl_penalty(logprobs, reference, kind)
            # verl also limits the value, not the gradient.
            torch.testing.assert_close(ours.clamp(-value_limit, value_limit), theirs, rtol=1e-12, atol=1e-12)
            assert torch.equal(ours.detach(), kl_estimate(logprobs.detach(), reference, kind[:-1], limit))
            gradients = [torch.autograd.grad(estimate.sum(), logprobs)[0] for estimate in (ours, theirs)]
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_straight_through_forms_have_the_mean_gradient_of_the_true_kl():
    """k1 has none in the mean, k3 that of the other direction."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, -0.5, 1.5, 0.4], dtype=torch.float64), 0)

    def mean_gradient(estimate):
        policy = torch.log_softmax(logits, 0)
        return torch.autograd.grad((policy.exp().detach() * estimate(policy)).sum(), logits)[0]

    policy = torch.log_softmax(logits, 0)
    expected = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)[0]
    for kind in ("k2", "k1+", "k3+"):
        gradient = mean_gradient(lambda policy, kind=kind: kl_estimate(policy, reference, kind))
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    assert mean_gradient(lambda policy: kl_estimate(policy, reference, "k1")).abs().max() < 1e-14
    reverse = mean_gradient(lambda policy: -(reference.exp() / policy.exp().detach()) * policy)
    torch.testing.assert_close(mean_gradient(lambda policy: kl_estimate(policy, reference, "k3")), reverse)
    assert (reverse - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradcheck(kind):
    """Gradient of the estimate, and of the clamped one where some tokens exceed the limits."""
    generator = torch.Generator().manual_seed(4)
    logprobs, reference = (torch.randn(60, generator=generator, dtype=torch.float64) for _ in range(2))
    smooth = ((logprobs - reference).abs() - 1.5).abs() > 1e-3
    logprobs, reference = logprobs[smooth].requires_grad_(), reference[smooth]
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, kind), logprobs)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, kind, log_ratio_limit=1.5), logprobs)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_extreme_differences_give_finite_losses_and_gradients_within_limits(kind):
    logprobs = torch.tensor([1e4, -1e4, 100.0, -100.0, 0.0], requires_grad=True)
    loss = kl_estimate(logprobs, torch.zeros(5), kind, log_ratio_limit=20.0)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all() and loss[4] == 0.0
    assert loss.abs().max() <= math.expm1(20.0)


def test_estimators_are_exactly_zero_for_equal_logprobs():
    logprobs = -100 * torch.rand(1000)
    for kind in KL_KINDS:
        assert torch.equal(kl_estimate(logprobs, logprobs.clone(), kind), torch.zeros(1000))


def test_k3_of_a_small_float32_difference_keeps_its_digits():
    difference = torch.tensor([1e-4], dtype=torch.float32)
    assert float(kl_estimate(difference, torch.zeros(1), "k3")) == pytest.approx(5e-9, rel=0.05)
    with pytest.raises(ValueError, match="'k4' is unknown, allowed: k1, k2, k3, k1\\+, k3\\+"):
        kl_estimate(difference, difference, "k4")
    with pytest.raises(ValueError, match="one shape"):
        kl_estimate(difference, torch.zeros(2), "k1")


def test_controllers_equal_verl():
    core = load_verl().core_algos
    for seed in range(CASES):
        draw = random.Random(seed)
        start, target, horizon = draw.uniform(1e-3, 1), draw.uniform(1e-2, 10), draw.uniform(500, 20000)
        ours, theirs = KLController(start, target, horizon), core.AdaptiveKLController(start, target, horizon)
        fixed, their_fixed = KLController(start), core.FixedKLController(start)
        for _ in range(20):
            measured, samples = target * draw.uniform(-1, 4), draw.randint(0, 512)
            for controller in (ours, theirs, fixed, their_fixed):
                controller.update(measured, samples)
            assert ours.coefficient == pytest.approx(float(theirs.value), rel=1e-13)
            assert fixed.coefficient == their_fixed.value == start


def test_state_survives_json_exactly():
    controller = KLController(0.1, 1.0, 1000)
    controller.update(1.13, 77)
    resumed = KLController(0.1, 1.0, 1000)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    for each in (controller, resumed):
        each.update(0.9, 31)
    assert resumed.coefficient == controller.coefficient != 0.1

    fixed = KLController(0.3)
    fixed.load_state_dict(json.loads(json.dumps(KLController(0.2).state_dict())))
    assert fixed.coefficient == 0.3
    with pytest.raises(ValueError, match="checkpoint is 'adaptive', this run has 'fixed'"):
        fixed.load_state_dict(controller.state_dict())
    with pytest.raises(ValueError, match="checkpoint is 'fixed', this run has 'adaptive'"):
        controller.load_state_dict(fixed.state_dict())


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_settings_are_rejected(bad):
    with pytest.raises(ValueError, match="coefficient must be"):
        KLController(bad)
    for arguments in ((bad, 1.0, 1.0), (1.0, bad, 1.0), (1.0, 1.0, bad)):
        with pytest.raises(ValueError, match="must be finite and > 0"):
            KLController(*arguments)
    with pytest.raises(ValueError, match="coefficient must be"):
        KLController(1.0, 1.0, 1.0).load_state_dict({"kind": "adaptive", "coefficient": bad})


def test_bad_measurements_leave_the_coefficient_alone():
    controller = KLController(0.1, 1.0, 100)
    refused = ((math.nan, 1, "finite"), (1.0, 500, "longer horizon"), (1.0, -1, "samples must"))
    for measured, samples, message in refused:
        with pytest.raises(ValueError, match=message):
            controller.update(measured, samples)
    assert controller.coefficient == 0.1


def test_the_unbiased_estimator_has_the_kl_and_its_gradient_whoever_drew_the_tokens():
    """Over all tokens, with the probabilities of another policy: value and gradient are the true KL's."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        logits, old, reference = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        logits = logits.requires_grad_()
        policy, old, reference = (torch.log_softmax(row, 0) for row in (logits, old, reference))
        true = (policy.exp() * (policy - reference)).sum()
        ours = (old.exp() * kl_estimate(policy, reference, "k3-unbiased", old_logprobs=old)).sum()
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-12)
        gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (ours, true)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_the_unbiased_estimator_of_a_policys_own_tokens_is_k3():
    logprobs, reference = -torch.rand(2, 50)
    ours = kl_estimate(logprobs, reference, "k3-unbiased")
    assert torch.equal(ours, kl_estimate(logprobs, reference, "k3"))
    assert torch.equal(ours, kl_estimate(logprobs, reference, "k3-unbiased", old_logprobs=logprobs))


# -- divergences over the vocabulary -----------------------------------------------------------------------------


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
