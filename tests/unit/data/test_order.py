"""The order of prompts: permutations, purity, resume."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from megarl.data.order import DifficultyPools, MixtureOrder, PromptOrder
from megarl.errors import RunStopped, UsageError
from megarl.flags.selection import parse_weights
from megarl.rollout import waiting_groups
from megarl.rollout.response_log import Record


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_each_epoch_is_a_permutation(size):
    order = PromptOrder(size, seed=3)
    for epoch in range(4):
        assert sorted(order.indices(epoch * size, size)) == list(range(size))


def test_epochs_and_seeds_differ():
    order = PromptOrder(50, seed=1)
    first, second = order.indices(0, 50), order.indices(50, 50)
    assert first != second
    assert first != list(range(50))
    assert PromptOrder(50, seed=2).indices(0, 50) != first
    # Neighbouring (seed, epoch) pairs must not be the same stream.
    assert PromptOrder(50, seed=2).indices(0, 50) != second


def test_the_order_is_the_same_everywhere():
    # Fixed values: a changed order would silently break every resumed run.
    assert PromptOrder(8, seed=1).indices(0, 16) == [3, 5, 2, 7, 0, 6, 1, 4, 0, 6, 5, 3, 4, 7, 2, 1]


def test_position_to_prompt_is_pure():
    order = PromptOrder(7, seed=5)
    whole = order.indices(0, 40)
    assert order.position == 0
    for start, count in [(30, 10), (0, 3), (6, 2), (13, 22), (39, 1), (5, 0)]:
        assert order.indices(start, count) == whole[start : start + count]


def test_taking_in_steps_equals_taking_at_once():
    pieces, whole = PromptOrder(7, seed=5), PromptOrder(7, seed=5)
    taken = [index for count in (3, 0, 9, 1, 20) for index in pieces.take(count)]
    assert taken == whole.take(33)
    assert pieces.position == whole.position == 33


def test_resume_equals_uninterrupted():
    order = PromptOrder(11, seed=9)
    order.take(17)
    state = json.loads(json.dumps(order.state_dict()))
    assert state == {"position": 17, "size": 11}
    resumed = PromptOrder(11, seed=9)
    resumed.load_state_dict(state)
    assert resumed.take(30) == order.take(30)


def test_another_size_is_rejected():
    order = PromptOrder(11, seed=9)
    with pytest.raises(UsageError, match="--prompts: the file has 11 prompts, .* with 12"):
        order.load_state_dict({"position": 3, "size": 12})
    assert order.position == 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_range(seed):
    with pytest.raises(UsageError, match=f"--seed {seed}"):
        PromptOrder(3, seed)
    PromptOrder(3, 2**64 - 1).take(4)


# -- difficulty pools --------------------------------------------------------------------------------------------------


BOUNDS = (0.25, 0.9)


def pools(size: int, weights: str = "0.5,1,0", retire_after: int = 0) -> DifficultyPools:
    return DifficultyPools(size, BOUNDS, parse_weights(weights), retire_after)


def moved(found: DifficultyPools, shares: dict[int, float]) -> DifficultyPools:
    for line, share in shares.items():
        found.add(line, share)
    found.end_step()
    return found


def fractions(found: DifficultyPools) -> dict[str, float]:
    return {name.removeprefix("pools/").removesuffix("_fraction"): value for name, value in found.metrics().items()}


def test_the_latest_group_says_how_difficult_a_prompt_is():
    found = moved(pools(8), {0: 0.0, 1: 0.25, 2: 0.26, 3: 0.89, 4: 0.9, 5: 1.0, 6: np.nan})
    assert found.chances.tolist() == [0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert fractions(found) == {"hard": 0.25, "normal": 0.5, "easy": 0.25, "retired": 0.0, "unseen": 0.25}
    moved(found, {0: 1.0, 4: 0.5})
    assert found.chances.tolist() == [0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]


def test_groups_count_from_the_end_of_their_step_and_the_last_one_wins():
    found = pools(2)
    found.add(0, 1.0)
    assert found.chances.tolist() == [1.0, 1.0]
    found.add(0, 0.0)
    found.end_step()
    assert found.chances.tolist() == [0.5, 1.0]


def test_hopeless_prompts_are_retired():
    found = pools(3, retire_after=2)
    moved(found, {0: 0.0, 1: 0.0, 2: 0.5})
    moved(found, {0: 0.1, 1: 0.5})
    assert found.chances.tolist() == [0.0, 1.0, 1.0] and fractions(found)["retired"] == pytest.approx(1 / 3)
    assert fractions(found)["hard"] == 0.0
    moved(found, {1: 0.0})
    assert found.chances.tolist() == [0.0, 0.5, 1.0]


def test_draws_follow_the_weights_and_every_epoch_has_the_normal_ones():
    found = moved(pools(30, "0.25,1,0"), {line: [0.0, 0.5, 1.0][line % 3] for line in range(30)})
    order, counts = PromptOrder(30, seed=3, chances=found.chances), Counter()
    while order.position < 30 * 400:
        counts.update(order.take(1))
    by_pool = [sum(counts[line] for line in range(pool, 30, 3)) for pool in range(3)]
    assert by_pool[2] == 0 and abs(by_pool[1] - 4000) <= 1 and abs(by_pool[0] - 1000) < 110  # four deviations
    assert len({counts[line] for line in range(1, 30, 3)}) <= 2


def test_rare_prompts_of_a_large_set_are_found_at_once():
    found = pools(10_000, "0.01,1,0")
    found.latest[:] = 1.0
    found.load_state_dict(found.state_dict() | {"latest": np.where(np.arange(10_000) == 7, 0.0, 1.0)}, "--load x")
    assert PromptOrder(10_000, seed=3, chances=found.chances).take(3) == [7, 7, 7]


@pytest.mark.parametrize("fields", [
    {}, {"latest": torch.zeros(5)}, {"latest": torch.zeros(4), "hard_in_a_row": torch.zeros(4).long()},
])  # fmt: skip
def test_a_damaged_record_is_refused(fields):
    with pytest.raises(UsageError, match="^--load x: "):
        waiting_groups.load_pools(pools(5), [Record({}, fields)], "--load x")


def test_a_record_restores_the_pools():
    found, other = moved(pools(5), {1: 0.0, 2: 1.0}), pools(5)
    state = {name: torch.from_numpy(values) for name, values in found.state_dict().items()}
    waiting_groups.load_pools(other, [Record({}, state)], "--load x")
    assert other.chances.tolist() == found.chances.tolist() and other.metrics() == found.metrics()


def test_without_a_group_the_order_is_that_without_pools():
    assert PromptOrder(7, 3, chances=pools(7).chances).take(40) == PromptOrder(7, 3).take(40)
    assert MixtureOrder([7, 5], [2, 1], 3, pools(12)).take(40) == MixtureOrder([7, 5], [2, 1], 3).take(40)


@pytest.mark.parametrize("sizes", [None, [9, 6]])
def test_a_resumed_order_goes_on_in_the_middle_of_an_epoch(sizes):
    def build():
        found = pools(15, "0.5,1,0.25", 3)
        is_mixture = sizes is not None
        return found, MixtureOrder(sizes, [3, 1], 5, found) if is_mixture else PromptOrder(15, 5, chances=found.chances)

    def steps(found, order, numbers) -> list[list[int]]:
        taken = []
        for number in numbers:
            taken.append(order.take(4))
            moved(found, {line: (line * number % 5) / 4 for line in taken[-1]})
        return taken

    whole, part, again = build(), build(), build()
    expected = steps(*whole, range(60))
    assert steps(*part, range(23)) == expected[:23]
    again[1].load_state_dict(json.loads(json.dumps(part[1].state_dict())))
    again[0].load_state_dict(part[0].state_dict(), "--load x")
    assert steps(*again, range(23, 60)) == expected[23:]
    assert len({tuple(sorted(step)) for step in expected}) > 20


def test_a_source_without_prompts_is_passed_over_and_the_end_is_said():
    found = pools(5)
    order = MixtureOrder([2, 3], [1, 1], 3, found)
    moved(found, {0: 1.0, 1: 1.0})
    assert set(order.take(9)) == {2, 3, 4}
    moved(found, dict.fromkeys(range(5), 1.0))
    for one in (order, PromptOrder(5, 3, chances=found.chances)):
        with pytest.raises(RunStopped, match="no prompt is left to draw"):
            one.take(1)


@pytest.mark.parametrize("wrong", [
    {"latest": np.zeros(4)}, {"hard_in_a_row": np.zeros(5)}, {"hard_in_a_row": np.full(5, -1)},
    {"latest": np.array([2.0, 0, 0, 0, 0])}, {"latest": np.array([np.inf, 0, 0, 0, 0])}, {"latest": np.zeros((5, 1))},
])  # fmt: skip
def test_a_wrong_state_is_refused(wrong):
    found = pools(5)
    with pytest.raises(UsageError, match="^--load x: has the pools of other prompts, or is damaged$"):
        found.load_state_dict(found.state_dict() | wrong, "--load x")
