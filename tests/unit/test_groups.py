"""Groups of equal and of unequal sizes: numbers of sequences, sums, shares of replicas, mini-batches."""

import pytest
import torch

from megarl.algorithms import ESTIMATORS
from megarl.algorithms.estimators import AdvantageOptions, StepData
from megarl.arguments import Settings
from megarl.comm import load_balance
from megarl.comm import microbatches as mb
from megarl.comm.load_balance import positions_by_group, with_whole_groups
from megarl.flags.settings import expected_responses, group_sizes
from megarl.groups import PromptGroups
from megarl.planning import traffic
from megarl.rollout.batcher import BatchHeader

SIZES = [4, 2, 1, 4, 2, 2, 4, 3]
MEMBERS = [list(range(sum(SIZES[:g]), sum(SIZES[: g + 1]))) for g in range(len(SIZES))]  # ids of each group


@pytest.mark.parametrize("sizes", [SIZES, [3, 3, 3], [1], [5], []])
def test_groups_count_sequences(sizes):
    """Against lists of the members of each group."""
    groups, ids = PromptGroups(sizes), list(range(sum(sizes)))
    members = [ids[sum(sizes[:g]) : sum(sizes[: g + 1])] for g in range(len(sizes))]
    of_ids = [g for g, size in enumerate(sizes) for _ in range(size)]
    assert (len(groups), groups.count) == (len(sizes), len(ids))
    assert groups.of(torch.tensor(ids, dtype=torch.int64)).tolist() == of_ids
    assert groups.starts.tolist() == [of_group[0] for of_group in members]
    values = torch.tensor(ids, dtype=torch.int64) * 7 % 5 - 2
    for how, function in (("sum", sum), ("amax", max), ("amin", min)):
        assert groups.reduce(values, how).tolist() == [function(values[of].tolist()) for of in members]
    for of_group, found in zip(members, groups.padded(values) if sizes else [], strict=True):
        assert found.tolist() == values[of_group].tolist() + [0] * (max(sizes) - len(of_group))
    chosen = torch.arange(len(sizes)) % 2 == 0
    assert groups.ids_of(chosen.nonzero().flatten()).tolist() == [i for of in members[::2] for i in of]
    assert groups.kept(chosen).sizes.tolist() == sizes[::2]
    assert groups.expand(chosen).tolist() == [g % 2 == 0 for g in of_ids]


def test_round_robin_keeps_the_samples_of_a_prompt_together():
    assert PromptGroups.equal(6, 2).round_robin(3).tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert PromptGroups.equal(2, 3).round_robin(1).tolist() == [0] * 6
    assert PromptGroups([1, 3, 2]).round_robin(2).tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("size, prompts", [(8, 2), (4, 1), (12, 3), (32, 8), (None, 8)])
def test_minibatches_of_unequal_groups_have_so_many_prompts(size, prompts):
    """`--minibatch-size` counts groups of `--samples-per-prompt`, so that every step has as many updates."""
    groups, counts = PromptGroups(SIZES), {"prompts_per_step": 8, "samples_per_prompt": 4, "minibatch_size": size}
    settings = Settings(**counts, seed=3, advantage="grpo", kl_coefficient=0.0)
    parts = [part.tolist() for part in mb.minibatches_of_step(settings, groups, step=1, epoch=0)]
    found = [[of for of in MEMBERS if of[0] in part] for part in parts]
    assert [sum(of, []) for of in found] == parts, "whole groups in ascending order"
    assert [len(of) for of in found] == [min(prompts, 8 - first) for first in range(0, 8, prompts)]
    assert len(parts) == settings.updates_per_step and sorted(sum(parts, [])) == list(range(groups.count))
    assert settings.updates_on_policy(len(groups)) == (len(parts) == 1)


@pytest.mark.parametrize("weights, sizes, prompts, found, expected", [
    ((3, 1), (None, 2), 8, {2, 4}, 28), ((1, 1), (8, 3), 3, {8, 3}, 17), ((1,), (None,), 5, {4}, 20),
])  # fmt: skip
def test_responses_of_a_step_by_the_shares_of_files(weights, sizes, prompts, found, expected, tmp_path):
    """Rounded up: half of 3 prompts with 8 responses each, and half with 3."""
    text = "".join(
        f"f{number}:\n  prompts: x\n  weight: {weight}\n" + f"  samples-per-prompt: {size}\n" * (size is not None)
        for number, (weight, size) in enumerate(zip(weights, sizes, strict=True))
    )
    (tmp_path / "mix.yaml").write_text(text)
    settings = Settings(prompts=str(tmp_path / "mix.yaml"), prompts_per_step=prompts, samples_per_prompt=4)
    assert group_sizes(settings) == found and expected_responses(settings) == expected
    assert traffic.step_sizes(settings).sequences == expected
    plain = Settings(prompts="x.jsonl", prompts_per_step=prompts, samples_per_prompt=4)
    assert group_sizes(plain) == {4} and expected_responses(plain) == plain.sequences_per_step


@pytest.mark.parametrize("message", [
    {}, {"lengths": [3, 4], "generated_on": [0, 0]}, {"lengths": [3], "generated_on": [0], "group_sizes": [2]},
    {"lengths": [3], "generated_on": [0, 0], "group_sizes": [1]},
    {"lengths": "x", "generated_on": [0], "group_sizes": [1]},
])  # fmt: skip
def test_a_damaged_header_of_a_batch_is_an_error(message):
    header = BatchHeader.decode({"lengths": [3, 4, 5], "generated_on": [0, 1, 0], "group_sizes": [1, 2]})
    assert BatchHeader.decode(header.encode()).group_sizes.tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="is damaged"):
        BatchHeader.decode(message)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_unequal_groups_stay_on_one_replica(replicas):
    groups = PromptGroups(SIZES * 3)
    lengths = torch.randint(5, 90, (groups.count,), generator=torch.Generator().manual_seed(2))
    split = load_balance.balance_by_flops(lengths, [torch.arange(groups.count)], replicas, 64)
    balanced = load_balance.balance_by_flops(lengths, [torch.arange(groups.count)], replicas, 64, groups)
    for found in (balanced, with_whole_groups(split, lengths, groups, replicas, 64)):
        first = groups.expand(found[groups.starts])
        assert torch.equal(first, found) and len(found.unique()) == replicas
    assert torch.equal(with_whole_groups(balanced, lengths, groups, replicas, 64), balanced)
    work = torch.zeros(replicas, dtype=torch.int64).index_add_(0, balanced, mb.sequence_flops(lengths, 64)).double()
    assert work.max() < 1.15 * work.mean()


def test_positions_by_unequal_groups():
    assert positions_by_group([1, 4, 5, 6, 10], PromptGroups(SIZES)) == [[0], [1, 2], [3], [4]]


NEEDS_NO_MODEL = [
    name for name, estimator in ESTIMATORS.items()
    if "groups" in estimator.needs and not estimator.needs & {"logprobs", "squares"}
]  # fmt: skip


def step_of(rewards: torch.Tensor, groups: torch.Tensor) -> StepData:
    """Responses of 1, 2, 3, … tokens, each with its reward at the last one."""
    count = len(rewards)
    lengths = torch.arange(count) % 3 + 1
    ends = lengths.cumsum(0)
    token_rewards = torch.zeros(int(ends[-1])).index_put((ends - 1,), rewards.float())
    return StepData(
        scores=rewards, raw_scores=rewards, groups=groups, response_lengths=lengths, baselines=None,
        sequence_ids=torch.arange(count), token_rewards=token_rewards, values=None,
        response_mask=torch.ones(len(token_rewards), dtype=torch.bool), cu_seqlens=torch.tensor([0, *ends.tolist()]),
        total=lambda sums: sums, parts=torch.stack([rewards, rewards.sin()], 1),
        part_weights=torch.tensor([1.0, 0.5], dtype=torch.float64),
    )  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_NO_MODEL)
def test_estimators_compare_each_unequal_group_alone(name):
    """The advantages of a step are those of its groups, each in a step of its own (whitening is of the whole step)."""
    rewards = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    options, groups = AdvantageOptions(whiten=False), PromptGroups(SIZES)
    whole = step_of(rewards, groups.of(torch.arange(groups.count)))
    found = ESTIMATORS[name].function(whole, options).advantages
    lengths = whole.response_lengths
    of_sequences = found[whole.cu_seqlens[:-1]]
    assert torch.equal(of_sequences.repeat_interleave(lengths), found)
    for ids in MEMBERS:
        own = step_of(rewards[ids], torch.zeros(len(ids), dtype=torch.int64))
        own.response_lengths[:] = lengths[ids]
        if name == "opo":  # weighs by the lengths of the step's responses
            expected = rewards[ids] - (lengths[ids] * rewards[ids]).sum() / lengths[ids].sum()
        else:
            expected = ESTIMATORS[name].function(own, options).advantages[own.cu_seqlens[:-1]]
        torch.testing.assert_close(of_sequences[ids].double(), expected.double(), rtol=1e-6, atol=1e-6)
