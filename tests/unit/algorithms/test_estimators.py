"""Whole estimators: against verl, zeros, what each reads, the split over ranks, and plug-ins."""

import dataclasses
import types

import pytest
import torch

from megarl.algorithms import ESTIMATORS, PREFERENCE_LOSSES
from megarl.algorithms.advantages import gae, token_rewards
from megarl.algorithms.aggregation import local_moments, whiten
from megarl.algorithms.estimators import AdvantageOptions, Advantages, StepData, estimator_of
from megarl.algorithms.packed import sums_by_sequence
from megarl.algorithms.preference_losses import PreferenceOptions
from tests.references.ragged import FEW, ragged_step, ragged_steps
from tests.references.verl_core_algos import load_verl

DPO, IPO = ((PREFERENCE_LOSSES[name], PreferenceOptions()) for name in ("dpo", "ipo"))
PLAIN, WHITE = (AdvantageOptions(gamma=0.97, whiten=whiten, preference=DPO) for whiten in (False, True))
BY_GROUP = ("grpo", "rloo", "opo", "reinforce++-baseline", "maxrl", "pass-at-k")
WHITENED = ("gae", "reinforce++", "reinforce++-baseline", "gdpo")


def alone(tensor):
    """Sum over the ranks of a world of one."""
    return tensor


def step_data(step, beta, dtype=torch.float64):
    """The whole step on one rank; `beta` weighs the KL penalty. Entries outside the mask are NaN: they are not read."""
    batch, where = step.batch, (step.batch.mask, step.batch.cu_seqlens)
    penalty = batch.normal()
    rewards = token_rewards(step.scores, penalty, beta, *where).to(dtype)
    probabilities = torch.rand(len(batch.mask), generator=batch.generator, dtype=torch.float64)
    return StepData(
        scores=sums_by_sequence(rewards.double(), *where),
        raw_scores=sums_by_sequence(token_rewards(step.scores, penalty, 0.0, *where).to(dtype).double(), *where),
        groups=step.groups,
        response_lengths=sums_by_sequence(batch.mask.long(), *where),
        baselines=torch.randn(len(step.groups), generator=batch.generator, dtype=torch.float64),
        sequence_ids=torch.arange(len(step.groups)),
        token_rewards=rewards.masked_fill(~batch.mask, float("nan")),
        values=batch.normal().to(dtype).masked_fill(~batch.mask, float("nan")),
        response_mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        total=alone,
        logprobs=-10 * torch.rand(len(step.groups), generator=batch.generator, dtype=torch.float64),
        token_logprobs=probabilities.log().masked_fill(~batch.mask, float("nan")),
        squares=(probabilities**2 + 0.3 * (1 - probabilities) ** 2).masked_fill(~batch.mask, float("nan")),
        parts=torch.randn(len(step.groups), 3, generator=batch.generator).double(),
        part_weights=torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64),
        reference_logprobs=-10 * torch.rand(len(step.groups), generator=batch.generator, dtype=torch.float64),
    )


def run(name, data, options):
    result = ESTIMATORS[name].function(data, options)
    for field in result:
        assert field is None or not field[~data.response_mask].any() and not field.requires_grad
    return result.advantages


# name here -> name in verl, fields that verl's function takes besides rewards and mask, options on both sides, whitened
SHARED = {
    "grpo": ("grpo", ["index"], {}, False),
    "grpo without std": ("grpo", ["index"], {"norm_adv_by_std_in_grpo": False}, False),
    "rloo": ("rloo", ["index"], {}, False),
    "rloo vectorized": ("rloo_vectorized", ["index"], {}, False),
    "opo": ("opo", ["index"], {}, False),
    "reinforce++": ("reinforce_plus_plus", [], {}, True),
    "reinforce++-baseline": ("reinforce_plus_plus_baseline", ["index"], {}, True),
    "remax": ("remax", ["reward_baselines"], {}, False),
}


@pytest.mark.parametrize("case", SHARED)
def test_estimators_equal_verl(case):
    name_there, fields, extra, whitened = SHARED[case]
    theirs = getattr(load_verl().core_algos, f"compute_{name_there}_outcome_advantage")
    options = dataclasses.replace(WHITE if whitened else PLAIN, group_std=not extra)
    compared = 0
    # A group of one has advantages of 0, and other ones in verl, which whitening would mix with the others.
    for number, step in enumerate(ragged_steps(lone=not whitened)):
        data, batch = step_data(step, beta=0.1 * (number // 4 % 2)), step.batch
        data = dataclasses.replace(data, raw_scores=data.scores)  # verl does not tell scores from the KL penalty
        ours = run(case.split(" ")[0], data, options)[batch.mask]
        if whitened and float(ours.abs().max()) < 1e-3:
            # Only rounding is left of equal values, and verl's count + 1e-8 shows in it: ours are looked at alone.
            assert not ours.any()
            continue
        have = {"index": step.labels, "reward_baselines": data.baselines}
        arguments = {field: have[field] for field in fields} | extra
        padded = batch.padded(data.token_rewards.nan_to_num()), batch.padded(batch.mask).double()
        expected = theirs(*padded[:1], response_mask=padded[1], config=types.SimpleNamespace(gamma=0.97), **arguments)
        # verl's whitening adds 1e-8 to the count: the looser tolerance is its error.
        close = dict(rtol=1e-6, atol=1e-6) if whitened else dict(rtol=1e-9, atol=1e-7)
        is_lone = ((step.sizes == 1) & ("index" in fields)).repeat_interleave(batch.cu_seqlens.diff())
        expected = torch.where(is_lone, 0.0, batch.packed(expected[0]))[batch.mask]
        torch.testing.assert_close(ours, expected, **close)
        compared += 1
    assert compared >= 95


@pytest.mark.parametrize("std", [True, False])
def test_pass_at_k_equals_verl(std):
    theirs, config = load_verl().core_algos.compute_grpo_passk_outcome_advantage, {"norm_adv_by_std_in_grpo": std}
    for step in ragged_steps(lone=False):
        data, batch = step_data(step, beta=0.0), step.batch
        ours = run("pass-at-k", data, dataclasses.replace(PLAIN, group_std=std))
        rewards, mask = batch.padded(data.token_rewards.nan_to_num()), batch.padded(batch.mask).double()
        expected, _ = theirs(rewards, response_mask=mask, index=step.labels, config=config)
        torch.testing.assert_close(ours, batch.packed(expected), rtol=1e-9, atol=1e-7)


def test_otb_equals_verl():
    """verl adds 1e-8 to the weights; groups of one and of equal scores have advantages of 0 here, and returns there."""
    theirs, compared = load_verl().core_algos.compute_multi_turn_optimal_token_baseline_advantage, 0
    for step in ragged_steps(lone=True):
        data, batch = step_data(step, beta=0.1), step.batch
        ours = run("otb", data, PLAIN)
        columns = [
            batch.padded(x.nan_to_num()).double() for x in (data.token_rewards, data.token_logprobs, data.squares)
        ]
        mask = batch.padded(batch.mask).double()
        expected, _ = theirs(columns[0], mask, step.labels, columns[1], columns[2])
        is_unequal = torch.stack([
            (data.raw_scores[data.groups == group].min() < data.raw_scores[data.groups == group].max())
            for group in data.groups
        ])  # fmt: skip
        counted = torch.repeat_interleave(is_unequal, batch.cu_seqlens.diff())
        torch.testing.assert_close(ours[counted], batch.packed(expected)[counted], rtol=1e-5, atol=1e-5)
        assert not ours[~counted].any()
        compared += bool(counted.any())
    assert compared >= 70


@pytest.mark.parametrize("std", [True, False])
def test_gdpo_equals_verl(std):
    """verl has parts in float32, so that its tolerance is that of these; and adds 1e-8 to the count in whitening."""
    theirs, compared = load_verl().core_algos.compute_gdpo_outcome_advantage, 0
    for step in ragged_steps(lone=False):
        data, batch = step_data(step, beta=0.0), step.batch
        ours = run("gdpo", data, dataclasses.replace(WHITE, group_std=std))
        mask = batch.padded(batch.mask).float()
        names = ["correct", "format", "length"]
        expected, _ = theirs(
            torch.zeros_like(mask), mask, step.labels, norm_adv_by_std_in_grpo=std,
            config={"gdpo_reward_keys": names, "gdpo_reward_weights": data.part_weights.tolist()},
            non_tensor_batch=dict(zip(names, data.parts.T.numpy(), strict=True)),
            batch={"prompts": mask[:, :0], "attention_mask": torch.ones_like(mask).long()},
        )  # fmt: skip
        if ours.abs().max() < 1e-3:  # only rounding is left of groups of one and of equal parts
            continue
        torch.testing.assert_close(ours.float(), batch.packed(expected), rtol=1e-3, atol=1e-4)
        compared += 1
    assert compared >= 90


def test_parts_that_are_equal_in_a_group_count_nothing():
    for step in ragged_steps(lone=True, count=FEW):
        data = step_data(step, 0.0)
        parts = data.parts.clone()
        parts[:, 1] = 0.1 * data.groups
        with_part, without = (
            run("gdpo", dataclasses.replace(data, parts=columns, part_weights=weights), PLAIN)
            for columns, weights in ((parts, data.part_weights), (parts[:, ::2], data.part_weights[::2]))
        )
        torch.testing.assert_close(with_part, without, rtol=1e-12, atol=1e-12)
        parts[:] = 0.1 * data.groups.unsqueeze(1)
        assert not run("gdpo", dataclasses.replace(data, parts=parts), WHITE).any()


def test_a_response_without_a_part_is_none_of_its_group():
    """As TRL's normalize_then_sum: mean and deviation of a part are over the responses that have it."""
    for step in ragged_steps(lone=True, count=FEW):
        data = step_data(step, 0.0)
        lacks = torch.arange(len(data.groups)) % 3 == 0
        parts = data.parts.clone()
        parts[lacks, 0] = torch.nan
        found = run("gdpo", dataclasses.replace(data, parts=parts), PLAIN)
        apart = torch.where(lacks, 1000 + torch.arange(len(data.groups)), data.groups)
        of_parts = [
            dataclasses.replace(data, parts=data.parts[:, i : i + 1], part_weights=data.part_weights[i : i + 1],
                                groups=apart if i == 0 else data.groups)
            for i in range(parts.shape[1])
        ]  # fmt: skip
        assert lacks.any() and found.isfinite().all()
        torch.testing.assert_close(found, sum(run("gdpo", one, PLAIN) for one in of_parts), rtol=1e-9, atol=1e-12)


def test_gae_equals_its_building_blocks_to_the_bit():
    for step in ragged_steps(lone=True):
        data = step_data(step, 0.1, torch.float32)
        advantages, returns = gae(data.token_rewards, data.values, data.response_mask, data.cu_seqlens, 0.97, 0.95)
        result = ESTIMATORS["gae"].function(data, PLAIN)
        assert torch.equal(result.advantages, advantages) and torch.equal(result.returns, returns)
        result = ESTIMATORS["gae"].function(data, WHITE)
        white = whiten(advantages, data.response_mask, local_moments(advantages, data.response_mask))
        assert torch.equal(result.advantages, white) and torch.equal(result.returns, returns)


def test_groups_of_one_and_groups_of_equal_scores_get_exactly_zero():
    for step in ragged_steps(lone=True, count=FEW):
        data = step_data(step, 0.1)
        lone = torch.isin(data.sequence_ids, (step.sizes == 1).nonzero())
        equal = dataclasses.replace(data, raw_scores=0.1 * data.groups.double())  # `scores` have a KL penalty
        for name in (*BY_GROUP, "preference", "otb"):
            of_sequence = sums_by_sequence(run(name, data, PLAIN).abs(), data.response_mask, data.cu_seqlens)
            assert not of_sequence[lone].any()
            for options in (PLAIN, WHITE):
                assert not run(name, equal, options).any()


@pytest.mark.parametrize("name", BY_GROUP)
def test_groups_of_unequal_scores_count_the_penalty(name):
    for step in ragged_steps(lone=False, count=FEW):
        data = step_data(step, 0.1)
        lowest, highest = (
            data.raw_scores.new_zeros(int(data.groups.max()) + 1).scatter_reduce(
                0, data.groups, data.raw_scores, kind, include_self=False
            )[data.groups]
            for kind in ("amin", "amax")
        )
        with_penalty = run(name, data, PLAIN)
        of_scores = run(name, dataclasses.replace(data, raw_scores=data.scores), PLAIN)
        is_equal = torch.repeat_interleave(lowest == highest, data.cu_seqlens.diff())
        assert torch.equal(with_penalty, torch.where(is_equal, 0.0, of_scores))


def test_remax_gives_zero_to_the_reward_of_the_greedy_response():
    for step in ragged_steps(lone=True):
        data = step_data(step, 0.0, torch.float32)
        assert not run("remax", dataclasses.replace(data, baselines=data.scores), PLAIN).any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_declared_needs_and_options_are_those_read(name):
    estimator, data = ESTIMATORS[name], step_data(ragged_step(8, lone=False), 0.1)
    first = run(name, data, PLAIN)
    others = dict(gamma=0.5, lam=0.5, length_alpha=0.3, group_std=False, whiten=True, credit_turns=20, preference=IPO)
    read = {field for field, value in others.items()
            if not torch.equal(first, run(name, data, dataclasses.replace(PLAIN, **{field: value})))}  # fmt: skip
    assert estimator.options == read and estimator.whiten == (name in WHITENED)
    # Fields that are not needed may be missing; then each response is its own group.
    missing = dict(
        values=None, baselines=None, logprobs=None, parts=None, squares=None, groups=torch.arange(len(data.groups))
    )
    for need, nothing in missing.items():
        if need not in estimator.needs:
            assert torch.equal(first, run(name, dataclasses.replace(data, **{need: nothing}), PLAIN))
    assert (ESTIMATORS[name].function(data, PLAIN).returns is not None) == ("values" in estimator.needs)
    if "groups" in estimator.needs:
        assert first.any() and not run(name, dataclasses.replace(data, groups=missing["groups"]), PLAIN).any()


def part_of(data, sequences):
    """The data of a rank with only these sequences, in this order."""
    spans = [slice(int(data.cu_seqlens[i]), int(data.cu_seqlens[i + 1])) for i in sequences]
    tokens = torch.cat([torch.arange(len(data.response_mask))[span] for span in spans] or [torch.arange(0)])
    names = ("token_rewards", "values", "response_mask", "token_logprobs", "squares")
    fields = {name: getattr(data, name)[tokens] for name in names}
    borders = torch.tensor([0, *(span.stop - span.start for span in spans)]).cumsum(0)
    return tokens, dataclasses.replace(data, sequence_ids=torch.tensor(sequences).long(), cu_seqlens=borders, **fields)


def on_ranks(name, parts, options):
    """Each rank's result. Ranks run again until the total of each of their sums is known."""
    sums = []
    while True:
        asked, results = [[] for _ in parts], []
        for part, of_rank in zip(parts, asked, strict=True):
            known = iter(list(sums))

            def total(x, of_rank=of_rank, known=known):
                of_rank.append(x.clone())
                return next(known, x)

            results.append(ESTIMATORS[name].function(dataclasses.replace(part, total=total), options))
        if len(sums) == len(asked[0]):
            return results
        sums.append(sum(of_rank[len(sums)] for of_rank in asked))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_results_do_not_depend_on_how_sequences_are_split_over_ranks(name):
    for number, step in enumerate(ragged_steps(lone=True, count=FEW // 2)):
        data = step_data(step, 0.1)
        order = torch.randperm(len(step.groups), generator=step.batch.generator).tolist()
        cut = number % (len(order) + 1)  # 0 and all of them: a rank without any sequence
        tokens, parts = zip(*(part_of(data, chosen) for chosen in (order[:cut], order[cut:])), strict=True)
        for options in (PLAIN, WHITE):
            whole = ESTIMATORS[name].function(data, options)
            for places, result in zip(tokens, on_ranks(name, parts, options), strict=True):
                if options.whiten or name == "otb":  # sums over the responses of two ranks
                    torch.testing.assert_close(result.advantages, whole.advantages[places], rtol=1e-12, atol=1e-12)
                else:
                    assert torch.equal(result.advantages, whole.advantages[places])
                assert whole.returns is None or torch.equal(result.returns, whole.returns[places])


def twice_the_score(step, options):
    """A careless plug-in: writes outside the mask and returns a tensor with a gradient."""
    weight = torch.ones((), requires_grad=True)
    return Advantages(weight * 2.0 * step.token_rewards.double() + options.gamma, None)


def test_plug_ins_are_wrapped():
    data = step_data(ragged_step(3, lone=True), 0.1, torch.float32)
    estimator = estimator_of(twice_the_score)
    assert estimator.needs == frozenset() and not estimator.whiten
    assert estimator.options == {"gamma", "lam", "length_alpha", "group_std", "whiten", "credit_turns"}
    advantages, returns = estimator.function(data, PLAIN)
    assert returns is None and advantages.dtype == torch.float32 and not advantages.requires_grad
    expected = (2.0 * data.token_rewards.double() + 0.97).float()
    assert torch.equal(advantages, torch.where(data.response_mask, expected, 0.0))

    def with_critic(step, options):
        return Advantages(step.token_rewards - step.values, step.token_rewards)

    with_critic.needs = ["values", "groups"]
    estimator = estimator_of(with_critic)
    assert estimator.needs == {"values", "groups"}
    assert torch.equal(estimator.function(data, PLAIN).returns, data.token_rewards.nan_to_num())


def test_wrong_plug_ins_are_rejected():
    data = step_data(ragged_step(3, lone=True), 0.1)

    def is_rejected(result, needs, match):
        def plug_in(step, options):
            return result

        plug_in.needs = needs
        with pytest.raises(ValueError, match=match):
            estimator_of(plug_in).function(data, PLAIN)

    ones = torch.ones_like(data.token_rewards)
    is_rejected(
        None,
        ["critic"],
        r"needs of .*plug_in must be from \['baselines', 'groups', 'parts', 'values'\], got \['critic'\]",
    )
    is_rejected(Advantages(ones[:1], None), [], r"plug_in must return \[T\] = .* got \[1\]")
    is_rejected(Advantages(ones, ones), [], r"plug_in must give returns if, and only if, it needs values")
    is_rejected(Advantages(ones, None), ["values"], "must give returns if")
    is_rejected(ones, [], r"must return Advantages\(advantages, returns\), got Tensor")
