"""Which parameters have their optimizer states on the host."""

import numpy as np
import pytest

from megarl.mcore.config.optimizer_flags import on_host


@pytest.mark.parametrize("sizes, fraction, chosen", [
    ([4, 3, 2, 1], 1.0, [1, 1, 1, 1]), ([4, 3, 2, 1], 0.5, [1, 0, 0, 1]), ([1, 2, 3, 4], 0.6, [0, 1, 0, 1]),
    ([10, 1, 1, 0], 0.5, [0, 1, 1, 0]), ([4, 4, 4, 4], 0.49, [1, 0, 0, 0]), ([0, 0, 0, 0], 1.0, [0, 0, 0, 0]),
    ([4, 3, 2, 1], 1e-9, [0, 0, 0, 0]),
])  # fmt: skip
def test_the_largest_states_that_fit_into_the_fraction_are_on_the_host(sizes, fraction, chosen):
    both = on_host(np.array([sizes, sizes[::-1]]), fraction)
    assert both[0].tolist() == list(map(bool, chosen)) and both[1].sum() == sum(chosen)
