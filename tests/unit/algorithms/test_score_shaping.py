"""Running moments against torch on all values at once, clipping, ensembles; the overlong penalty."""

import json

import pytest
import torch

from megarl.algorithms.score_shaping import RunningMoments, clip, combine, overlong_penalty


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_of_batches_are_those_of_all_values(offset):
    values = torch.randn(1000, dtype=torch.float64, generator=torch.manual_seed(3)) * 3 + offset
    moments = RunningMoments()
    for part in values.split([1, 0, 2, 500, 497]):
        moments.update(part)
    assert moments.count == 1000
    assert moments.mean == pytest.approx(float(values.mean()), rel=1e-14)
    assert moments.deviation == pytest.approx(float(values.std()), rel=1e-9)
    normal = moments.normalize(values)
    assert abs(float(normal.mean())) < 1e-8 and float(normal.std()) == pytest.approx(1.0, rel=1e-9)


def test_equal_values_become_zero():
    moments = RunningMoments()
    assert moments.deviation == 0.0
    moments.update(torch.full((5,), 0.1))
    assert moments.normalize(torch.full((2,), 0.1)).tolist() == [0.0, 0.0]


def test_a_file_keeps_moments_to_the_last_bit():
    first, second = RunningMoments(), RunningMoments()
    first.update(torch.rand(7))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    more = torch.rand(5)
    first.update(more)
    second.update(more)
    assert vars(first) == vars(second)


def test_clip_and_ensembles():
    scores = torch.tensor([[1.0, -4.0], [3.0, 2.0]])
    assert clip(scores, 2.5).tolist() == [[1.0, -2.5], [2.5, 2.0]] and clip(scores, None) is scores
    assert combine(scores, "mean").tolist() == [2.0, -1.0] and combine(scores, "min").tolist() == [1.0, -4.0]


# -- the overlong penalty -----------------------------------------------------------------------------------------


def test_no_response_has_no_penalty():
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), 2, 1).shape == (0,)


@pytest.mark.parametrize("limit, buffer", [(20480, 4096), (37, 36), (1, 1), (100, 7)])
def test_three_cases_of_the_paper(limit, buffer):
    lengths = torch.arange(limit + buffer + 2)
    for length, penalty in zip(lengths.tolist(), overlong_penalty(lengths, limit, buffer).tolist(), strict=True):
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - buffer) - length) / buffer
        else:
            expected = -1.0
        assert penalty == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("buffer", [-1, 0, 17])
def test_wrong_buffers_are_rejected(buffer):
    with pytest.raises(ValueError, match=rf"buffer must be in \[1, limit 16\], got {buffer}"):
        overlong_penalty(torch.tensor([1]), 16, buffer)
