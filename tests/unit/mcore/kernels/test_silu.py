"""SiLU and GELU: a token's result does not depend on the number of tokens and threads."""

import torch
from torch.nn import functional

from megarl.mcore.kernels.gelu import gelu_tanh
from megarl.mcore.kernels.silu import _shared_rows, silu
from tests.helpers.worlds import run_world

WIDTHS, ROWS = (352, 48), (1, 4, 97, 99, 107, 257, 1333, 2751)


def differing_rows(rank: int, threads: int) -> list[tuple[int, int, int]]:
    """(width, rows, how many) of rows whose SiLU, or its gradient, depends on other rows."""
    torch.set_num_threads(threads)
    found = []
    for width in WIDTHS:
        both = torch.randn(max(ROWS), 1, 2 * width, generator=torch.Generator().manual_seed(0))
        alone = torch.cat([functional.silu(row.chunk(2, -1)[0]) for row in both.split(4)])
        for rows in ROWS:
            x = both[:rows].clone().requires_grad_()
            y = silu(x.chunk(2, -1)[0])
            y.sum().backward()
            wanted = torch.sigmoid(both[:rows, :, :width])
            wanted = wanted * (1 + both[:rows, :, :width] * (1 - wanted))
            assert torch.allclose(x.grad[..., :width], wanted, atol=1e-6) and not x.grad[..., width:].any()
            found.append((width, rows, int((y != alone[:rows]).flatten(1).any(1).sum())))
    return found


def test_no_row_depends_on_others():
    for threads in (1, 2, 3):
        ((found),) = run_world(differing_rows, 1, threads)
        assert len(found) == len(WIDTHS) * len(ROWS) and not any(count for _, _, count in found), threads


def differing_rows_of_gelu(rank: int, threads: int) -> list[int]:
    """How many rows' GELU, or its gradient, depends on other rows; of each number of rows."""
    torch.set_num_threads(threads)
    both = torch.randn(max(ROWS), 1, 2 * 48, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([functional.gelu(row.chunk(2, -1)[0], approximate="tanh") for row in both.split(4)])
    exact = both.double()[..., :48]
    inner = 0.7978845608028654 * (exact + 0.044715 * exact**3)
    assert (alone - exact / 2 * (1 + inner.tanh())).abs().max() < 1e-6
    return [int((gelu_tanh(both[:rows].chunk(2, -1)[0]) != alone[:rows]).flatten(1).any(1).sum()) for rows in ROWS]


def test_no_row_of_gelu_depends_on_others():
    for threads in (1, 2, 3):
        ((found),) = run_world(differing_rows_of_gelu, 1, threads)
        assert not any(found), threads


def test_threads_split_by_whole_rows(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cases = {(0, 0): 0, (1, 8): 1, (7, 7 * 352): 7, (103, 103 * 352): 102, (401, 401 * 352): 400, (3, 3 * 40_000): 3}
    assert {case: _shared_rows(*case) for case in cases} == cases
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert _shared_rows(401, 401 * 352) == 401
