"""SiLU and GELU: a token's result does not depend on the number of tokens and threads."""

import torch

from megarl.mcore.kernels.batch_invariance import _shared_rows, gelu, gelu_tanh, quick_gelu, silu
from tests.helpers.worlds import run_world

ROWS = (1, 4, 7, 9, 13, 97, 99, 107, 257, 1333, 2751)
FUNCTIONS = {silu: (352, 48), gelu_tanh: (48, 40), quick_gelu: (48, 40), gelu: (48, 40)}  # and widths


def exact(function, x):
    """SiLU; GELU with tanh, with the logistic function, and with erf."""
    x = x.double()
    tanh = x / 2 * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh())
    erf = x / 2 * (1 + torch.erf(x / 2**0.5))
    return {silu: x * torch.sigmoid(x), gelu_tanh: tanh, quick_gelu: x * torch.sigmoid(1.702 * x), gelu: erf}[function]


def differing_rows(rank: int, threads: int) -> list[int]:
    """How many rows' results depend on other rows: of each function, of rows next to each other in memory and apart,
    and of each number of rows."""
    torch.set_num_threads(threads)
    found = []
    for function, width in ((function, width) for function, widths in FUNCTIONS.items() for width in widths):
        both = torch.randn(max(ROWS), 1, 2 * width, generator=torch.Generator().manual_seed(0))
        apart = both.chunk(2, -1)[0]
        alone = torch.cat([function(row) for row in apart.split(4)])
        assert (alone - exact(function, apart)).abs().max() < 1e-6
        for rows in (apart, apart.contiguous()):  # gates of SwiGLU are halves of rows
            found += [int((function(rows[:n]) != alone[:n]).flatten(1).any(1).sum()) for n in ROWS]
    return found


def test_no_row_depends_on_others():
    for threads in (1, 3):
        (found,) = run_world(differing_rows, 1, threads)
        assert len(found) == 4 * 2 * 2 * len(ROWS) and not any(found), threads


def test_gradients():
    x = torch.linspace(-6, 6, 4 * 48).view(4, 48)
    for function in FUNCTIONS:
        inputs = x.clone().requires_grad_(), x.double().requires_grad_()
        results = function(inputs[0]), exact(function, inputs[1])
        gradients = [torch.autograd.grad(out.sin().sum(), y)[0] for out, y in zip(results, inputs, strict=True)]
        assert (gradients[0] - gradients[1]).abs().max() < 2e-6


def test_threads_split_by_whole_rows(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cases = {(0, 0): 0, (1, 8): 1, (7, 7 * 352): 7, (103, 103 * 352): 102, (401, 401 * 352): 400, (3, 3 * 40_000): 3}
    assert {case: _shared_rows(*case) for case in cases} == cases
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert _shared_rows(401, 401 * 352) == 401
