"""Preference losses of a policy, and the model that reward models share: formulas, gradients, limits, options."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import logsigmoid

from megarl.algorithms import ESTIMATORS, PREFERENCE_LOSSES
from megarl.algorithms.aggregation import aggregate, local_counts
from megarl.algorithms.estimators import AdvantageOptions, StepData
from megarl.algorithms.packed import sums_by_sequence
from megarl.algorithms.policy_loss import PolicyTokens
from megarl.algorithms.policy_losses.single_tokens import reinforce
from megarl.algorithms.preference_losses import (
    PairLogprobs,
    PreferenceOptions,
    best_and_worst,
    bradley_terry,
    kto,
    log_odds,
    mismatched_divergence,
)
from tests.references.ragged import ragged_steps

PAIRS = 200
LOGPROBS = ("chosen", "rejected")
OF_PAIRS = [name for name, loss in PREFERENCE_LOSSES.items() if loss.reads_pairs]


def drawn(seed: int = 1) -> PairLogprobs:
    """Pairs of 1 to 40 tokens with log-probs around −1 a token, and a reference that is near."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(PAIRS, generator=generator, dtype=torch.float64)

    counts = [torch.randint(1, 41, (PAIRS,), generator=generator).double() for _ in range(2)]
    sums = [-2 * uniform() * count for count in counts]
    near = [total + (uniform() - 0.5) * count for total, count in zip(sums, counts, strict=True)]
    return PairLogprobs(*sums, *counts, *near, margin=uniform())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def written_out(name: str, w, l, nw, nl, rw, rl, m, o: PreferenceOptions) -> float:  # noqa: E741
    """The loss of one pair from sums of log-probs, counts, the reference's sums and the margin."""
    if name in ("dpo", "rpo"):
        d = o.beta * ((w - rw) - (l - rl)) - m
        loss = -(1 - o.label_smoothing) * math.log(sigmoid(d)) - o.label_smoothing * math.log(sigmoid(-d))
        return loss - (o.coefficient * w / nw if name == "rpo" else 0)
    if name == "ipo":
        return ((w - rw) / nw - (l - rl) / nl - 1 / (2 * o.beta)) ** 2
    if name == "simpo":
        d = o.beta * (w / nw - l / nl) - o.gamma
        return -(1 - o.label_smoothing) * math.log(sigmoid(d)) - o.label_smoothing * math.log(sigmoid(-d))
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (w / nw, l / nl)]
    return -w / nw - o.coefficient * math.log(sigmoid(math.log(odds[0] / odds[1])))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", OF_PAIRS)
def test_the_formulas_and_their_gradients(name, smoothing):
    pairs, options = drawn(), PreferenceOptions(beta=0.3, label_smoothing=smoothing, gamma=0.7, coefficient=0.4)
    loss = PREFERENCE_LOSSES[name].function
    rows = torch.stack(list(vars(pairs).values()), 1).tolist()
    expected = torch.tensor([written_out(name, *row, options) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(loss(pairs, options).loss, expected, rtol=1e-9, atol=1e-12)

    def of(chosen, rejected):
        return loss(dataclasses.replace(pairs, chosen=chosen, rejected=rejected), options).loss

    leaves = tuple(getattr(pairs, field).clone().requires_grad_() for field in LOGPROBS)
    assert torch.autograd.gradcheck(of, leaves)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_only_the_options_that_a_loss_names_change_it(name):
    """So that a flag without effect is always one that the loss does not name."""
    pairs, named = drawn(2), PREFERENCE_LOSSES[name]
    options = PreferenceOptions(beta=0.3, label_smoothing=0.1, gamma=0.7, coefficient=0.4)
    before = named.function(pairs, options)
    for option in PreferenceOptions._fields:
        after = named.function(pairs, options._replace(**{option: getattr(options, option) + 0.2}))
        assert (option in named.options) == (not torch.equal(before.loss, after.loss)), option
    changed = {
        "reads_margin": dataclasses.replace(pairs, margin=pairs.margin + 1),
        "needs_reference": dataclasses.replace(pairs, reference_chosen=pairs.reference_chosen - 1),
    }
    for attribute, other in changed.items():
        assert getattr(named, attribute) == (not torch.equal(before.loss, named.function(other, options).loss))


@pytest.mark.parametrize("name", OF_PAIRS)
def test_rewards_are_constants_and_order_the_pairs_as_the_loss_does(name):
    pairs, named = drawn(3), PREFERENCE_LOSSES[name]
    leaves = {field: getattr(pairs, field).clone().requires_grad_() for field in LOGPROBS}
    terms = named.function(dataclasses.replace(pairs, **leaves), named.defaults)
    assert not (terms.chosen_reward.requires_grad or terms.rejected_reward.requires_grad)
    terms.loss.sum().backward()
    assert (leaves["rejected"].grad >= 0).all() or name == "ipo"  # IPO pulls a difference that is too large back
    better = dataclasses.replace(pairs, chosen=pairs.chosen / 2)
    assert (named.function(better, named.defaults).chosen_reward > terms.chosen_reward).all()


def test_equal_policies_have_the_loss_of_a_coin():
    pairs = drawn(4)
    equal = {
        "reference_chosen": pairs.chosen,
        "reference_rejected": pairs.rejected,
        "margin": torch.zeros(PAIRS).double(),
    }
    terms = PREFERENCE_LOSSES["dpo"].function(dataclasses.replace(pairs, **equal), PreferenceOptions())
    assert (terms.loss == math.log(2)).all() and not terms.chosen_reward.any()


def test_the_odds_of_certain_tokens_are_finite():
    means = torch.tensor([0.0, -1e-15, -1e-8, -0.5, -800.0], dtype=torch.float64, requires_grad=True)
    odds = log_odds(means)
    odds.sum().backward()
    assert odds.isfinite().all() and means.grad.isfinite().all() and (odds.diff() <= 0).all()
    assert odds[3].item() == pytest.approx(-0.5 - math.log(1 - math.exp(-0.5)), rel=1e-14)


def test_shapes_must_agree():
    fields = vars(drawn(5))
    with pytest.raises(ValueError, match="margin"):
        PairLogprobs(**fields | {"margin": fields["margin"][1:]})


def test_kto_is_its_formula_with_its_gradient():
    pairs, generator = drawn(6), torch.Generator().manual_seed(6)
    is_desirable = torch.rand(PAIRS, generator=generator) < 0.4
    options = PreferenceOptions(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    divergence = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def loss(logprobs):
        return kto(logprobs, pairs.reference_chosen, is_desirable, divergence, options)[0]

    expected = []
    rows = torch.stack([pairs.chosen, pairs.reference_chosen, is_desirable.double()], 1).tolist()
    for logprob, reference, good in rows:
        difference = 0.3 * (logprob - reference) - 0.3 * 0.9
        expected.append(1.5 * (1 - sigmoid(difference)) if good else 0.7 * (1 - sigmoid(-difference)))
    leaf = pairs.chosen.clone().requires_grad_()
    torch.testing.assert_close(loss(leaf), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(loss, (leaf,))
    loss(leaf).sum().backward()
    assert divergence.grad is None and ((leaf.grad < 0) == is_desirable).all()


def test_the_divergence_is_a_mean_that_is_not_negative():
    assert mismatched_divergence(torch.tensor(3.0), torch.tensor(4.0)) == 0.75
    assert mismatched_divergence(torch.tensor(-3.0), torch.tensor(4.0)) == 0


# -- Bradley and Terry's model ------------------------------------------------------------------------------------


SCORED = 40


def drawn_scores(seed: int, spread: float = 2.0):
    """(chosen, rejected, margin), float64; the margins are not negative."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = (spread * torch.randn(SCORED, generator=generator, dtype=torch.float64) for _ in range(2))
    return chosen, rejected, torch.rand(SCORED, generator=generator, dtype=torch.float64)


def test_losses_of_torch_that_are_the_same_function():
    """A choice of two is a logistic regression on the difference of the scores with the label 1."""
    chosen, rejected, margin = drawn_scores(5)
    chosen, rejected, margin = (x.requires_grad_() for x in (chosen, rejected, margin))
    terms, difference = bradley_terry(chosen, rejected, margin), chosen - rejected - margin.detach()
    ones = torch.ones_like(difference)
    for other in (
        -functional.logsigmoid(difference),
        functional.binary_cross_entropy_with_logits(difference, ones, reduction="none"),
        functional.soft_margin_loss(difference, ones, reduction="none"),
        functional.cross_entropy(
            torch.stack([chosen - margin, rejected], 1), torch.zeros(SCORED).long(), reduction="none"
        ),
    ):
        torch.testing.assert_close(terms, other, rtol=1e-12, atol=1e-14)
    terms.sum().backward()
    assert margin.grad is None and torch.equal(chosen.grad, -rejected.grad)  # only the difference counts


def test_equal_scores_cost_exactly_log_2():
    scores = torch.tensor([0.0, 1.5, -700.0, 3e4])
    terms = bradley_terry(scores, scores.clone(), torch.zeros(4))
    assert torch.equal(terms, torch.full((4,), math.log(2)))
    around_zero = scores, -scores, torch.zeros(4)
    assert torch.equal(bradley_terry(*around_zero, 5.0), bradley_terry(*around_zero))


def test_a_margin_asks_for_more_and_centring_for_scores_around_zero():
    chosen, rejected, margin = drawn_scores(3)
    assert (bradley_terry(chosen, rejected, margin + 0.5) > bradley_terry(chosen, rejected, margin)).all()
    centred = bradley_terry(chosen, rejected, margin, 0.25) - bradley_terry(chosen, rejected, margin)
    torch.testing.assert_close(centred, 0.25 * (chosen + rejected) ** 2, rtol=1e-10, atol=1e-12)


def test_large_differences_stay_finite():
    far = torch.tensor([1e4, -1e4, 3e38], requires_grad=True)
    terms = bradley_terry(far, torch.zeros(3), torch.zeros(3))
    terms.sum().backward()
    assert terms.tolist() == [0.0, 1e4, 0.0] and far.grad.tolist() == [0.0, -1.0, 0.0]
    assert bradley_terry(*torch.zeros(3, 0), 0.1).shape == (0,)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 2, 1)])
def test_wrong_shapes_are_rejected(sizes):
    with pytest.raises(ValueError, match="one shape"):
        bradley_terry(*map(torch.zeros, sizes))


# -- pairs of groups: which responses they are, and that their policy gradient is the loss's own -------------------


OPTIONS = PreferenceOptions(beta=0.3, gamma=0.5, coefficient=0.7)


def pairs_in_python(scores: list[float], groups: list[int]) -> tuple[list[tuple[int, int]], int]:
    """(best and worst of each group by number, groups of equal scores)."""
    pairs, ties = [], 0
    for group in sorted(set(groups)):
        members = [i for i, other in enumerate(groups) if other == group]
        best, worst = max(members, key=lambda i: scores[i]), min(members, key=lambda i: scores[i])
        if scores[best] > scores[worst]:
            pairs.append((best, worst))
        else:
            ties += len(members) > 1
    return pairs, ties


def test_the_pair_of_a_group_is_its_first_best_and_its_first_worst():
    found = [0, 0]
    for number, step in enumerate(ragged_steps(lone=True)):
        scores = step.scores.double().mul(number % 3).round()  # many are equal, every third time all
        groups = torch.where(step.groups == 1, 3 * len(scores), step.groups)  # the number of a response without a score
        pairs, ties = pairs_in_python(scores.tolist(), groups.tolist())
        best, worst, equal = best_and_worst(scores, groups)
        assert list(zip(best.tolist(), worst.tolist(), strict=True)) == pairs and equal == ties
        found = [found[0] + len(pairs), found[1] + ties]
    assert min(found) > 60


def of_step(step, logprobs: torch.Tensor) -> StepData:
    """The data of a step whose policy has these log-probs of tokens."""
    where = step.batch.mask, step.batch.cu_seqlens
    return StepData(
        scores=step.scores.double(), raw_scores=step.scores.double(), groups=step.groups,
        response_lengths=sums_by_sequence(step.batch.mask.long(), *where), baselines=None,
        sequence_ids=torch.arange(len(step.groups)), token_rewards=torch.zeros_like(logprobs), values=None,
        response_mask=step.batch.mask, cu_seqlens=step.batch.cu_seqlens, total=lambda sums: sums,
        logprobs=sums_by_sequence(logprobs.detach(), *where),
        reference_logprobs=sums_by_sequence(logprobs.detach() + 0.3 * step.batch.normal(), *where),
    )  # fmt: skip


def mean_loss(name: str, data: StepData, sums: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """The mean loss of the pairs; of dpo as online DPO has it (TRL's OnlineDPOTrainer)."""
    best, worst = torch.tensor(pairs).unbind(1)
    reference, lengths = data.reference_logprobs, data.response_lengths.double()
    if name == "dpo":
        return -logsigmoid(OPTIONS.beta * (sums[best] - sums[worst] - (reference[best] - reference[worst]))).mean()
    of_pairs = PairLogprobs(sums[best], sums[worst], lengths[best], lengths[worst], reference[best], reference[worst],
                            torch.zeros(len(pairs)).double())  # fmt: skip
    return PREFERENCE_LOSSES[name].function(of_pairs, OPTIONS).loss.mean()


@pytest.mark.parametrize("name", OF_PAIRS)
def test_the_policy_gradient_is_the_gradient_of_the_loss(name):
    options, compared = AdvantageOptions(preference=(PREFERENCE_LOSSES[name], OPTIONS)), 0
    for step in ragged_steps(lone=True):
        where = step.batch.mask, step.batch.cu_seqlens
        logprobs = (-step.batch.normal().abs() - 0.1).requires_grad_()
        data = of_step(step, logprobs)
        # A response without tokens is alone in a group, as `StepData` says.
        empty = data.response_lengths == 0
        data = dataclasses.replace(data, groups=torch.where(empty, len(empty) + torch.arange(len(empty)), data.groups))
        pairs, _ = pairs_in_python(data.raw_scores.tolist(), data.groups.tolist())
        (advantages, returns), metrics = ESTIMATORS["preference"].run(data, options)
        assert torch.equal(advantages, ESTIMATORS["preference"].function(data, options).advantages)
        assert returns is None and metrics["preference/pairs"] == len(pairs)
        tokens = PolicyTokens(logprobs, logprobs.detach(), advantages, *where)
        loss = reinforce(tokens, None).loss
        value = aggregate(loss, *where, "seq-mean-token-sum", local_counts(*where))
        (ours,) = torch.autograd.grad(value, logprobs)
        if not pairs:
            assert not ours.any() and set(metrics) == {"preference/pairs", "preference/ties"}
            continue
        expected = mean_loss(name, data, sums_by_sequence(logprobs, *where), pairs)
        assert metrics["preference/loss"] == pytest.approx(float(expected.detach()), rel=1e-12)
        torch.testing.assert_close(ours, *torch.autograd.grad(expected, logprobs), rtol=1e-10, atol=1e-14)
        compared += 1
    assert compared > 50
