"""The routes that a rank holds, by token. What routers do with them is tested in tests/unit/mcore/moe and programs."""

import torch

from megarl.router_replay.router_state import RouteTable


def test_rows_of_a_route_table():
    rows = torch.tensor([[[1, 4]], [[0, 2]]], dtype=torch.int16)
    table = RouteTable(rows, torch.tensor([1, -1, 0]))
    assert table.of(torch.tensor([2, 0, 1, 3, 9])).tolist() == [[[1, 4]], [[0, 2]], [[-1, -1]], [[-1, -1]], [[-1, -1]]]
    assert table.of(torch.zeros(0, dtype=torch.int64)).shape == (0, 1, 2)
    nothing = RouteTable(rows[:0], torch.full((3,), -1))
    assert nothing.of(torch.tensor([0, 3])).tolist() == [[[-1, -1]]] * 2 and nothing.rows.dtype == torch.int16
