"""Keys of random streams: equal to those that training computes with tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.counter_rng import stream_keys
from megarl.serving.keys import SERVE_STEP, random_seed, stream_key


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_keys_are_those_of_the_rollout(seed, prompt, choice):
    expected = stream_keys(seed, SERVE_STEP, torch.tensor([prompt]), torch.tensor([choice]))
    assert [stream_key(seed, prompt, choice)] == expected.tolist()


def test_random_seeds_differ():
    assert len({random_seed() for _ in range(100)}) == 100
