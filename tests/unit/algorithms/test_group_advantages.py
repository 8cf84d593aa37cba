"""Group advantages: against plain loops and closed forms; exact zeros; independent of the responses' order; by turns.

Whole estimators are compared with verl in test_estimators.py.
"""

import dataclasses
import functools
import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch

from megarl.algorithms import ESTIMATORS
from megarl.algorithms.advantages import token_rewards
from megarl.algorithms.estimators import AdvantageOptions, StepData
from megarl.algorithms.group_advantages import best_of_group, centred, grpo, maxrl, opo, returns_to_go, rloo, turn_sums
from megarl.algorithms.packed import sums_by_sequence, turn_numbers
from tests.references.ragged import FEW, ragged_steps

CLOSE = dict(rtol=1e-9, atol=1e-7)  # below the 1e-6 that is promised; scores go up to 1e6


def by_group(step, function):
    """[N]: a plain loop that applies a function to the members of each group."""
    result = [0.0] * len(step.groups)
    for group in set(step.groups.tolist()):
        members = [i for i, other in enumerate(step.groups.tolist()) if other == group]
        if len(members) > 1:
            for place, number in zip(members, function(members), strict=True):
                result[place] = number
    return torch.tensor(result, dtype=torch.float64)


def test_maxrl_and_the_best_of_a_group_equal_plain_loops():
    for step in ragged_steps(lone=True):
        scores = step.scores.tolist()

        def by_mean(members):
            own = [scores[i] for i in members]
            mean = math.fsum(own) / len(own)
            return [(score - mean) / mean if mean > 0 and min(own) < max(own) else 0.0 for score in own]

        def beyond_others(members):
            others = {i: max(scores[j] for j in members if j != i) for i in members}
            return [max(0.0, scores[i] - others[i]) for i in members]

        torch.testing.assert_close(maxrl(step.scores, step.groups), by_group(step, by_mean), **CLOSE)
        best = best_of_group(step.scores, step.groups, std=False)
        torch.testing.assert_close(best, by_group(step, beyond_others), **CLOSE)


def every_estimator(scores, groups, lengths):
    return [centred(scores, groups), grpo(scores, groups), grpo(scores, groups, std=False), rloo(scores, groups),
            opo(scores, groups, lengths)]  # fmt: skip


def test_equal_scores_and_groups_of_one_give_exactly_zero():
    awkward = [0.1, 1 / 3, -1e30, 1e-300, 123456.789, 0.0]
    for value in awkward:
        for size in range(1, 60):
            scores = torch.full((size,), value, dtype=torch.float64)
            lengths = torch.arange(size) * 7 + 1
            for result in every_estimator(scores, torch.zeros(size, dtype=torch.int64), lengths):
                assert torch.equal(result, torch.zeros_like(scores)), (value, size)
    scores = torch.tensor(awkward, dtype=torch.float64)
    for result in every_estimator(scores, torch.arange(6), torch.ones(6)):
        assert torch.equal(result, torch.zeros_like(scores))


def test_bits_do_not_depend_on_the_order_of_responses_or_the_numbers_of_groups():
    for step in ragged_steps(lone=True):
        generator, number = step.batch.generator, len(step.groups)
        lengths = torch.randint(0, 50, (number,), generator=generator)
        order = torch.randperm(number, generator=generator)
        renamed = torch.randperm(number + 5, generator=generator)[step.groups]
        here = every_estimator(step.scores, step.groups, lengths)
        there = every_estimator(step.scores[order], renamed[order], lengths[order])
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one[order], other)


def test_the_smallest_difference_is_seen():
    near = torch.tensor([1.0, 1.0 + 2.0**-40], dtype=torch.float64)
    assert centred(near, torch.zeros(2, dtype=torch.int64)).tolist() == [-(2.0**-41), 2.0**-41]


@pytest.mark.parametrize("function", [centred, grpo, rloo, functools.partial(opo, response_lengths=torch.ones(0))])
def test_no_response_at_all(function):
    assert function(torch.zeros(0).double(), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_not_a_number_stays_in_its_group():
    scores = torch.tensor([float("nan"), 1.0, 1.0, 3.0], dtype=torch.float64)
    result = grpo(scores, torch.tensor([0, 0, 1, 1]))
    assert result.isnan().tolist() == [True, True, False, False]


def test_wrong_arguments_are_rejected():
    scores, groups = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    for function in (centred, grpo, rloo):
        with pytest.raises(ValueError, match=r"must both be \[S\], got \[3\] and \[2\]"):
            function(scores, groups[:2])
    with pytest.raises(ValueError, match=r"response_lengths must be \[3\], got \[2\]"):
        opo(scores, groups, groups[:2])


# -- by turns -----------------------------------------------------------------------------------------------------

TURNS = 20  # at least the turns of every ragged batch
BY_TURN = AdvantageOptions(credit_turns=TURNS)


def data_of(step, beta: float, masked=None) -> StepData:
    """A step on one rank with rewards on many tokens; NaN outside the mask: it is not read."""
    batch = step.batch
    mask = batch.mask if masked is None else masked
    where = mask, batch.cu_seqlens
    of_turns, penalty = batch.normal() * (batch.normal() > 1), batch.normal()
    rewards, raw = (of_turns + token_rewards(step.scores, penalty, factor, *where) for factor in (beta, 0.0))
    lengths = sums_by_sequence(mask.long(), *where)
    number = len(step.groups)
    return StepData(
        scores=sums_by_sequence(rewards, *where), raw_scores=sums_by_sequence(raw, *where),
        groups=torch.where(lengths > 0, step.groups, number + torch.arange(number)), response_lengths=lengths,
        baselines=None, sequence_ids=torch.arange(number), token_rewards=rewards.masked_fill(~mask, float("nan")),
        values=None, response_mask=mask, cu_seqlens=batch.cu_seqlens, total=lambda table: table,
        raw_token_rewards=raw.masked_fill(~mask, float("nan")),
    )  # fmt: skip


def by_loop(data: StepData) -> list[float]:
    """Return-to-go minus the mean of the other responses' at the same turn, token by token."""
    spans = list(itertools.pairwise(data.cu_seqlens.tolist()))
    numbers = [turn_numbers(data.response_mask, data.cu_seqlens)[a:b].tolist() for a, b in spans]
    rewards = [data.token_rewards[a:b].tolist() for a, b in spans]

    def to_go(i: int, turn: int) -> float:
        return sum(r for r, number in zip(rewards[i], numbers[i], strict=True) if number >= turn >= 0)

    found, groups = [], data.groups.tolist()
    for i, of_sequence in enumerate(numbers):
        others = [j for j in range(len(spans)) if j != i and groups[j] == groups[i]]
        for number in of_sequence:
            if number < 0 or not others:
                found.append(0.0)
            else:
                found.append(to_go(i, number) - sum(to_go(j, number) for j in others) / len(others))
    return found


@pytest.mark.parametrize("lone", [False, True])
def test_advantages_equal_a_loop(lone):
    compared = 0
    for number, step in enumerate(ragged_steps(lone)):
        if step.kind == "extreme":  # sums of twelve orders of magnitude are compared with nothing
            continue
        data = data_of(step, 0.1 * (number % 2))
        # The loop does not tell the rewards from the penalty.
        data = dataclasses.replace(data, raw_scores=data.scores, raw_token_rewards=None)
        found = ESTIMATORS["rloo"].function(data, BY_TURN).advantages
        expected = torch.tensor(by_loop(data), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        by_episode = ESTIMATORS["rloo"].function(data, AdvantageOptions()).advantages
        compared += not torch.allclose(found, by_episode)
    assert compared > 50


def first_turns(batch) -> torch.Tensor:
    """The mask with the first turn of each sequence alone."""
    return turn_numbers(batch.mask, batch.cu_seqlens) == 0


@pytest.mark.parametrize("whiten", [False, True])
def test_episodes_of_one_turn_get_the_bits_of_rloo(whiten):
    plain, by_turn = (dataclasses.replace(options, whiten=whiten) for options in (AdvantageOptions(), BY_TURN))
    for step in ragged_steps(lone=True, count=FEW):
        data = data_of(step, 0.1, first_turns(step.batch))
        found, expected = (ESTIMATORS["rloo"].function(data, options).advantages for options in (by_turn, plain))
        assert torch.equal(found, expected)


def test_equal_returns_give_exact_zeros_turn_by_turn():
    """Two responses with 0.1 + 0.2 and 0.3 for the first turn, and 0.7 both for the second, plus a penalty."""
    mask = torch.tensor([False, True, False, True] * 3)
    cu_seqlens = torch.tensor([0, 4, 8, 12])
    raw = torch.tensor([0, 0.1, 0, 0.7, 0, 0.3, 0, 0.7, 0, 0.9, 0, 0.7], dtype=torch.float64)
    rewards = raw - 0.001 * torch.arange(12, dtype=torch.float64).square()
    scores, raw_scores = (sums_by_sequence(field, mask, cu_seqlens) for field in (rewards, raw))
    of_step = scores, raw_scores, torch.zeros(3).long(), torch.full((3,), 2), None
    data = StepData(*of_step, torch.arange(3), rewards, None, mask, cu_seqlens, lambda table: table, raw)
    advantages = ESTIMATORS["rloo"].function(data, BY_TURN).advantages
    assert advantages.nonzero().flatten().tolist() == [1, 5, 9]
    without = dataclasses.replace(data, raw_token_rewards=None)  # as if the penalty were part of the rewards
    assert ESTIMATORS["rloo"].function(without, BY_TURN).advantages.nonzero().flatten().tolist() == [1, 3, 5, 7, 9, 11]


FAILED_CASES = [
    ("rloo", BY_TURN), ("rloo", AdvantageOptions()), ("grpo", AdvantageOptions()), ("opo", AdvantageOptions()),
    ("reinforce++-baseline", AdvantageOptions(whiten=True)),
]  # fmt: skip


def test_failed_episodes_are_in_no_baseline():
    """The advantages are those of the step without them, to the bit."""
    failed = 0
    for step in ragged_steps(lone=True, count=FEW):
        draw = random.Random(len(step.groups))
        chosen = torch.tensor([draw.random() < 0.3 for _ in step.groups])
        mask = step.batch.mask & ~chosen.repeat_interleave(torch.tensor(step.batch.lengths))
        data = data_of(step, 0.0, mask)
        kept = (data.response_lengths > 0).nonzero().flatten()
        if not len(kept):
            continue
        tokens = torch.cat([torch.arange(*data.cu_seqlens[i : i + 2].tolist()) for i in kept.tolist()])
        fields = {name: getattr(data, name)[tokens] for name in ("token_rewards", "raw_token_rewards", "response_mask")}
        lengths = torch.tensor(step.batch.lengths)[kept]
        sequences = {name: getattr(data, name)[kept] for name in ("scores", "raw_scores", "groups", "response_lengths")}
        borders = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
        alone = dataclasses.replace(
            data, sequence_ids=torch.arange(len(kept)), cu_seqlens=borders, **fields, **sequences
        )
        for name, options in FAILED_CASES:
            found, expected = (ESTIMATORS[name].function(each, options).advantages for each in (data, alone))
            if options.whiten:  # sums over tokens in another order
                torch.testing.assert_close(found[tokens], expected, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(found[tokens], expected)
            assert found.isfinite().all()
        failed += len(step.groups) - len(kept)
    assert failed > 100


def test_more_turns_than_allowed_are_an_error():
    mask, cu_seqlens = torch.tensor([True, False, True]), torch.tensor([0, 3])
    rewards = torch.tensor([1.0, 9.0, 2.0])
    assert turn_sums(rewards, mask, cu_seqlens, 3).tolist() == [[1.0, 2.0, 0.0]]
    with pytest.raises(ValueError, match="has 2 turns; max_turns is 1"):
        turn_sums(rewards, mask, cu_seqlens, 1)


# -- a two-turn decision process, enumerated ---------------------------------------------------------------------

ACTIONS, LATER = 3, 2  # of the first and of the second turn
BITS = (0.4, 0.6)  # probabilities of the environment's random bit
FIRST = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.0, -0.4]], dtype=torch.float64)  # reward by bit and first action
SECOND = torch.tensor([[[1.0, -0.5], [0.2, 2.0]], [[-1.0, 0.4], [0.0, 1.5]]], dtype=torch.float64)  # bit, actions


class Episode(NamedTuple):
    """One of the ways in which an episode can go. Action 2 of the first turn ends it."""

    bit: int
    actions: tuple[int, ...]

    def rewards(self) -> list[float]:
        first = FIRST[self.bit, self.actions[0]].tolist()
        return [first] if len(self.actions) == 1 else [first, SECOND[self.bit][self.actions].tolist()]


EPISODES = [
    Episode(bit, actions)
    for bit in range(2)
    for actions in [(2,), *itertools.product(range(ACTIONS - 1), range(LATER))]
]


def logprobs_of_turns(logits: torch.Tensor) -> torch.Tensor:
    """[E, 2] log-probs of the actions of each episode, 0 for a turn that does not happen; `logits` [3 + 2·2·2]."""
    first = logits[:ACTIONS].log_softmax(0)
    second = logits[ACTIONS:].view(2, ACTIONS - 1, LATER).log_softmax(-1)  # what is observed: the bit and the action
    rows = []
    for bit, actions in EPISODES:
        later = second[bit, actions[0], actions[1]] if len(actions) > 1 else logits.new_zeros(())
        rows.append(torch.stack([first[actions[0]], later]))
    return torch.stack(rows)


def exact_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Of the expected sum of rewards of an episode."""
    chances = torch.tensor([BITS[episode.bit] for episode in EPISODES], dtype=torch.float64)
    earned = torch.tensor([sum(episode.rewards()) for episode in EPISODES], dtype=torch.float64)
    expected = (chances * logprobs_of_turns(logits).sum(1).exp() * earned).sum()
    return torch.autograd.grad(expected, logits)[0]


def outcomes(size: int, same_start: bool) -> torch.Tensor:
    """[O, size] all groups of episodes; with `same_start` the bit is the same for the whole group."""
    pairs = itertools.product(range(len(EPISODES)), repeat=size)
    bits = [episode.bit for episode in EPISODES]
    return torch.tensor([group for group in pairs if not same_start or len({bits[i] for i in group}) == 1])


def by_credit(groups: torch.Tensor) -> torch.Tensor:
    """[O, size, 2] advantages of turns by `--advantage rloo --credit turns`: one step whose groups are all outcomes."""
    lengths, mask, rewards = [], [], []
    for number in groups.flatten().tolist():
        tokens, earned = [False], [0.0]
        for reward in EPISODES[number].rewards():
            tokens += [True, True, False]  # two tokens of the policy, the reward on the second, and an observation
            earned += [0.0, reward, 0.0]
        lengths.append(len(tokens))
        mask += tokens
        rewards += earned
    where = torch.tensor(mask), torch.tensor([0, *lengths]).cumsum(0)
    rewards, count = torch.tensor(rewards, dtype=torch.float64), groups.numel()
    scores = sums_by_sequence(rewards, *where)
    data = StepData(scores, scores, torch.arange(count) // groups.shape[1], sums_by_sequence(where[0].long(), *where),
                    None, torch.arange(count), rewards, None, *where, lambda table: table)  # fmt: skip
    advantages = ESTIMATORS["rloo"].function(data, AdvantageOptions(credit_turns=2)).advantages
    return turn_sums(advantages, *where, 2).view(*groups.shape, 2) / 2  # both tokens of a turn have its advantage


def normalized_by_turn(groups: torch.Tensor) -> torch.Tensor:
    """[O, size, 2] the same with mean and deviation over the episodes that reach a turn, the own one among them."""
    to_go = returns_to_go(torch.tensor([(episode.rewards() + [0.0])[:2] for episode in EPISODES], dtype=torch.float64))
    reached = torch.tensor([[True, len(episode.actions) > 1] for episode in EPISODES])[groups]
    values = torch.where(reached, to_go[groups], 0.0)
    counts = reached.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(reached, values - values.sum(1, keepdim=True) / counts, 0.0)
    deviation = (centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
    return centred / (deviation + 1e-6)


def expected_gradient(logits: torch.Tensor, groups: torch.Tensor, advantages: torch.Tensor, same_start: bool):
    """Of mean_i Σ_k A_ik·∇log π over all groups, weighed by how likely they are."""
    logprobs = logprobs_of_turns(logits)
    bits = torch.tensor(BITS, dtype=torch.float64)[torch.tensor([episode.bit for episode in EPISODES])][groups]
    chances = logprobs.sum(1).exp()[groups].prod(1) * (bits[:, 0] if same_start else bits.prod(1))
    torch.testing.assert_close(chances.sum(), chances.new_ones(()), rtol=1e-12, atol=0)
    surrogate = (chances.detach() * (advantages * logprobs[groups]).sum(2).mean(1)).sum()
    return torch.autograd.grad(surrogate, logits)[0]


@pytest.mark.parametrize("same_start", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_gradient_is_the_exact_one(size, same_start):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(ACTIONS + 2 * 2 * LATER, generator=generator, dtype=torch.float64).requires_grad_()
    groups, exact = outcomes(size, same_start), exact_gradient(logits)
    found = expected_gradient(logits, groups, by_credit(groups), same_start)
    assert exact.abs().max() > 0.1
    assert float((found - exact).abs().max()) < 1e-12
    biased = expected_gradient(logits, groups, normalized_by_turn(groups), same_start)
    # Not even along the exact gradient: no learning rate mends it.
    cosine = torch.nn.functional.cosine_similarity(biased, exact, dim=0)
    assert float((biased - exact).abs().max()) > 0.01 and float(cosine) < 0.999


# -- the same with branches (`--branch-turns 1`) -----------------------------------------------------------------


def branched_outcomes(size: int, branch: int, same_start: bool) -> torch.Tensor:
    """[O, size] the groups whose branches share the bit and the first action."""
    groups = outcomes(size, same_start)
    starts = torch.tensor([episode.bit * ACTIONS + episode.actions[0] for episode in EPISODES])[groups]
    firsts = starts[:, ::branch].repeat_interleave(branch, 1)[:, :size]
    return groups[(starts == firsts).all(1)]


@pytest.mark.parametrize("same_start", [False, True])
@pytest.mark.parametrize("size, branch", [(4, 2), (3, 1), (4, 3)])
def test_the_gradient_of_shared_turns_is_the_exact_one_but_for_its_length(size, branch, same_start):
    """Shared turns are compared with their own copies, too, which takes a factor off their gradient and turns nothing:
    (N − B) / (N − 1) with branches of B among N samples. Later turns have the exact gradient."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(ACTIONS + 2 * 2 * LATER, generator=generator, dtype=torch.float64).requires_grad_()
    groups, exact = branched_outcomes(size, branch, same_start), exact_gradient(logits)
    is_first = torch.arange(size) % branch == 0
    logprobs = logprobs_of_turns(logits)[groups]  # [O, size, 2]
    bits = torch.tensor(BITS, dtype=torch.float64)[torch.tensor([episode.bit for episode in EPISODES])][groups]
    once = torch.where(is_first, logprobs[..., 0], 0.0).sum(1) + logprobs[..., 1].sum(1)
    chances = once.exp() * (bits[:, 0] if same_start else bits[:, is_first].prod(1))
    torch.testing.assert_close(chances.sum(), chances.new_ones(()), rtol=1e-12, atol=0)
    surrogate = (chances.detach() * (by_credit(groups) * logprobs).sum(2).mean(1)).sum()
    found = torch.autograd.grad(surrogate, logits)[0]
    sizes = torch.tensor([min(branch, size - start) for start in range(0, size, branch) for _ in range(branch)][:size])
    factor = ((size - sizes).double() / (size - 1)).mean()  # of each sample; branches of one have 1
    torch.testing.assert_close(found[ACTIONS:], exact[ACTIONS:], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[:ACTIONS], factor * exact[:ACTIONS], rtol=0, atol=1e-12)
    assert branch == 1 or factor < 0.9
