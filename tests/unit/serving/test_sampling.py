"""Keys of random streams: equal to those that training computes with tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import token_sampling
from megarl.serving.sampling import SERVE_STEP, stream_key, stream_keys


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_keys_are_those_of_the_rollout(seed, prompt, choice):
    expected = token_sampling.stream_keys(seed, SERVE_STEP, torch.tensor([prompt]), torch.tensor([choice]))
    assert [stream_key(seed, prompt, choice)] == expected.tolist()


def test_keys_without_a_seed_differ():
    assert len({stream_keys(None, 1, 1)[0] for _ in range(100)}) == 100
