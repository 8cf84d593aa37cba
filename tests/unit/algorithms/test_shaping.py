"""The overlong penalty at its corners and against DAPO's three cases."""

import pytest
import torch

from megarl.algorithms.shaping import overlong_penalty


def test_corners():
    lengths = torch.tensor([0, 1, 12, 13, 14, 16, 17, 20, 10**12])
    penalties = overlong_penalty(lengths, limit=16, buffer=4)
    assert penalties.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0, -1.0]
    assert penalties.dtype == torch.float32
    assert overlong_penalty(torch.tensor([0, 1, 2]), limit=2, buffer=2).tolist() == [0.0, -0.5, -1.0]
    assert overlong_penalty(torch.tensor([1, 2]), limit=2, buffer=1).tolist() == [0.0, -1.0]
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
