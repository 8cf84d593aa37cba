"""Rows of an output layer reach ranks that hold other rows of it; those beyond the vocabulary are nobody's."""

import torch
import torch.distributed as dist

from tests.helpers.worlds import run_world


def moved(rank: int) -> list[list[float]]:
    """Rows 0-2 and 3-5 of [6, 2], as ranks hold them that have 4 rows each."""
    from megarl.mcore.weights.head_transfer import HeadRows
    from megarl.mcore.weights.reshard import WeightTransfer

    held = HeadRows(torch.arange(12.0).view(6, 2)[3 * rank : 3 * rank + 3], 3 * rank, 6)
    rows = torch.zeros(4, 2, dtype=torch.float64)
    wanted = HeadRows(rows[: max(6 - 4 * rank, 0)], 4 * rank, 6)
    WeightTransfer(held, wanted, dist.group.WORLD).run()
    return rows.tolist()


def test_each_row_arrives_once():
    first, second = run_world(moved, 2)
    assert [*first, *second] == [*torch.arange(12.0).view(6, 2).tolist(), [0, 0], [0, 0]]
