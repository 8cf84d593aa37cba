"""The order of prompts: permutations, purity, resume."""

import json

import pytest

from megarl.data.order import PromptOrder
from megarl.errors import UsageError


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
