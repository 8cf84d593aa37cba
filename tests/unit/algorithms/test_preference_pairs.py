"""Pairs of groups: which responses they are, and that the policy gradient with their advantages is the loss's own."""

import dataclasses

import pytest
import torch
from torch.nn.functional import logsigmoid

from megarl.algorithms import ESTIMATORS, PREFERENCE_LOSSES
from megarl.algorithms.aggregation import aggregate, local_counts
from megarl.algorithms.estimators import AdvantageOptions, StepData
from megarl.algorithms.packed import sums_by_sequence
from megarl.algorithms.policy_loss import NoOptions, PolicyTokens
from megarl.algorithms.policy_losses.single_tokens import reinforce
from megarl.algorithms.preference_losses import PairLogprobs, PreferenceOptions
from megarl.algorithms.preference_pairs import best_and_worst
from tests.references.ragged import ragged_steps

OPTIONS = PreferenceOptions(beta=0.3, gamma=0.5, coefficient=0.7)
OF_PAIRS = [name for name, loss in PREFERENCE_LOSSES.items() if loss.reads_pairs]


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
        ours = best_and_worst(scores, groups)
        assert list(zip(ours.chosen.tolist(), ours.rejected.tolist(), strict=True)) == pairs and ours.ties == ties
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


def written_out(name: str, data: StepData, sums: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
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
        loss = reinforce(tokens, NoOptions()).loss
        value = aggregate(loss, *where, "seq-mean-token-sum", local_counts(*where))
        (ours,) = torch.autograd.grad(value, logprobs)
        if not pairs:
            assert not ours.any() and set(metrics) == {"preference/pairs", "preference/ties"}
            continue
        expected = written_out(name, data, sums_by_sequence(logprobs, *where), pairs)
        assert metrics["preference/loss"] == pytest.approx(float(expected.detach()), rel=1e-12)
        torch.testing.assert_close(ours, *torch.autograd.grad(expected, logprobs), rtol=1e-10, atol=1e-14)
        compared += 1
    assert compared > 50
