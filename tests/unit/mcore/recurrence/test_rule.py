"""Any recurrent layer: a token has the same bits under any cut of its sequence, with any number of threads."""

import pytest
import torch

from megarl.mcore.kernels import native
from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.mcore.recurrence.rule import apply_rule
from megarl.mcore.recurrence.runs import NONE
from megarl.mcore.recurrence.state_space import SpaceSizes
from tests.helpers.models.recurrent_inputs import (
    BOUNDED,
    CHANNELS,
    DELTA,
    SPACE,
    drawn,
    empty_states,
    leaves,
    of_table,
    runs_of,
)

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.absence())
SIZES = [
    *(CHANNELS, BOUNDED._replace(keys=5, decays=5)),
    *(DELTA, HeadSizes(1, 2, 5, 16), HeadSizes(4, 4, 128, 128), HeadSizes(2, 6, 16, 80)),
    *(SPACE, SpaceSizes(1, 2, 5, 16), SpaceSizes(4, 8, 128, 64), SpaceSizes(2, 6, 16, 80)),
]


@pytest.mark.parametrize(
    "sizes", [DELTA, CHANNELS, BOUNDED, SPACE], ids=["heads", "channels", "bounded", "state space"]
)
def test_a_token_has_the_same_bits_under_any_cut(sizes):
    """One run, two, one token a call, beside others, after a copied state, and with gradients."""
    inputs = drawn(41, sizes)
    whole = of_table(inputs, sizes, [[0, 41, NONE, 0]], empty_states(1, sizes))
    states = empty_states(3, sizes)
    parts = [of_table(inputs.at(torch.arange(17)), sizes, [[0, 17, NONE, 2]], states)]
    parts.append(of_table(inputs.at(torch.arange(17, 41)), sizes, [[0, 0, 2, 1], [0, 24, 1, 1]], states))
    assert torch.equal(torch.cat(parts), whole)
    states = empty_states(2, sizes)
    single = [
        of_table(inputs.at(torch.tensor([i])), sizes, [[0, 1, NONE if i == 0 else 1, 1]], states) for i in range(41)
    ]
    assert torch.equal(torch.cat(single), whole)
    other, of_rows = drawn(12, sizes, seed=3), [name for name, x in inputs._asdict().items() if len(x) == 41]
    joined = inputs._replace(**{name: torch.cat([getattr(other, name), getattr(inputs, name)]) for name in of_rows})
    beside = of_table(joined, sizes, [[12, 41, NONE, 0], [0, 12, NONE, NONE]], empty_states(1, sizes))
    assert len(of_rows) in (2, 3) and torch.equal(beside[12:], whole)
    trained = apply_rule(leaves(inputs), sizes, runs_of([41], padding=0))
    assert torch.equal(trained.detach(), whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_token_has_the_same_bits_with_any_number_of_threads(sizes):
    inputs, before, found = drawn(300, sizes), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            table = [[0, 200, NONE, 0], [200, 100, NONE, NONE]]
            found.append(of_table(inputs, sizes, table, empty_states(1, sizes)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found) and found[0].isfinite().all()
