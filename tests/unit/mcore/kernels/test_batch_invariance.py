"""SiLU and GELU: a token's result does not depend on the number of tokens and threads."""

import torch
from torch.nn import functional

from megarl.mcore.kernels.batch_invariance import _shared_rows, gelu, gelu_tanh, quick_gelu, silu
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
    for threads in (1, 3):
        ((found),) = run_world(differing_rows, 1, threads)
        assert len(found) == len(WIDTHS) * len(ROWS) and not any(count for _, _, count in found), threads


def exact_gelus(x):
    """GELU with tanh, with the logistic function, and with erf."""
    x = x.double()
    tanh = x / 2 * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh())
    return tanh, x * torch.sigmoid(1.702 * x), x / 2 * (1 + torch.erf(x / 2**0.5))


def differing_rows_of_gelus(rank: int, threads: int) -> list[int]:
    """How many rows' GELUs depend on other rows: of each, of rows next to each other in memory and apart, and of each
    number of rows."""
    torch.set_num_threads(threads)
    found = []
    for width in (48, 40):
        both = torch.randn(max(ROWS), 1, 2 * width, generator=torch.Generator().manual_seed(0))
        apart = both.chunk(2, -1)[0]
        for function, exact in zip((gelu_tanh, quick_gelu, gelu), exact_gelus(apart), strict=True):
            alone = torch.cat([function(row) for row in apart.contiguous().split(4)])
            assert (alone - exact).abs().max() < 1e-6
            for rows in (apart, apart.contiguous()):
                found += [int((function(rows[:n]) != alone[:n]).flatten(1).any(1).sum()) for n in (*ROWS, 7, 9, 13)]
    return found


def test_gradients_of_gelus():
    x = torch.linspace(-6, 6, 4 * 48).view(4, 48)
    for i, function in enumerate((gelu_tanh, quick_gelu, gelu)):
        inputs = x.clone().requires_grad_(), x.double().requires_grad_()
        found, expected = function(inputs[0]), exact_gelus(inputs[1])[i]
        gradients = [torch.autograd.grad(out.sin().sum(), y)[0] for out, y in zip((found, expected), inputs)]
        assert (gradients[0] - gradients[1]).abs().max() < 2e-6


def test_no_row_of_gelus_depends_on_others():
    for threads in (1, 3):
        ((found),) = run_world(differing_rows_of_gelus, 1, threads)
        assert not any(found), threads


def test_threads_split_by_whole_rows(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cases = {(0, 0): 0, (1, 8): 1, (7, 7 * 352): 7, (103, 103 * 352): 102, (401, 401 * 352): 400, (3, 3 * 40_000): 3}
    assert {case: _shared_rows(*case) for case in cases} == cases
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert _shared_rows(401, 401 * 352) == 401
