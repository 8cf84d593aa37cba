"""Inputs, states and runs of layers with a recurrent state, of either rule, for tests."""

import numpy as np
import torch
from torch import Tensor

from megarl.batch import SharedPrefix
from megarl.mcore.attention.packing import runs_of_stream
from megarl.mcore.attention.segments import TokenStream
from megarl.mcore.recurrence import AnyInputs, apply_rule
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.runs import Runs, States
from megarl.mcore.recurrence.state_space import SpaceInputs, SpaceSizes

TAPS = 4
DELTA = HeadSizes(groups=2, heads=4, keys=24, values=32)
CHANNELS = HeadSizes(groups=4, heads=4, keys=24, values=160, decays=24)  # values of several turns of the kernel
BOUNDED = CHANNELS._replace(bound=-5.0)
SPACE = SpaceSizes(groups=2, heads=6, keys=24, values=32, min_step=0.01)
LENGTHS = (150, 67, 5, 9, 70, 1, 2, 23)
# Sequences 1 and 4 continue 66 tokens of the first one, and sequence 3 four of sequence 2.
HOLDERS, PREFIXES = (0, 0, 2, 2, 0, 5, 6, 7), (0, 66, 0, 4, 66, 0, 0, 0)
STREAMS = [(tuple(range(8)), (0,) * 8), (HOLDERS, PREFIXES)]


def drawn(rows: int, sizes: HeadSizes | SpaceSizes, seed: int = 0) -> AnyInputs:
    """Inputs with decays between almost 0 and almost 1, and of the state space some steps below the smallest."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    decays = sizes.wide["alpha"] if isinstance(sizes, HeadSizes) else sizes.heads
    x, first = normal(rows, sizes.channels), normal(rows, decays)
    if isinstance(sizes, HeadSizes):
        second, weight = normal(rows, sizes.heads), normal(sizes.channels, 1, TAPS)
        return Inputs(x, first, second, weight, 2 * normal(sizes.heads), 2 * normal(decays) - 2)
    weight, bias = normal(sizes.channels, 1, TAPS), normal(sizes.channels)
    return SpaceInputs(
        x, first, weight, bias, 2 * normal(sizes.heads), 2 * normal(sizes.heads) - 3, normal(sizes.heads)
    )


def stream(lengths=LENGTHS, holders=None, prefixes=None, padding: int = 3) -> TokenStream:
    """The token stream of sequences that may share prefixes."""
    shared = None if holders is None else SharedPrefix(torch.tensor(holders), torch.tensor(prefixes))
    return TokenStream.of(np.array(lengths), shared, lambda tokens: tokens + padding)


def runs_of(lengths=LENGTHS, holders=None, prefixes=None, padding: int = 3) -> Runs:
    """The runs of such a stream."""
    return runs_of_stream(stream(lengths, holders, prefixes, padding), TAPS)


def rows_of_sequences(tokens: TokenStream) -> list[Tensor]:
    """The rows of each sequence's tokens in the stream, shared ones included; the padding last."""
    own = [torch.arange(start, end) for start, end in zip(tokens.starts, tokens.ends, strict=True)]
    firsts = zip(tokens.holders.tolist(), tokens.prefix_lengths.tolist(), strict=True)
    return [torch.cat([own[holder][:length], rows]) for (holder, length), rows in zip(firsts, own, strict=True)]


def leaves(inputs: AnyInputs, dtype: torch.dtype = torch.float32) -> AnyInputs:
    """Copies that get gradients."""
    return type(inputs)(*(x.to(dtype, copy=True).requires_grad_() for x in inputs))


def expected_of(by_transformers, inputs: AnyInputs, sizes, holders, prefixes) -> tuple[Tensor, Tensor, tuple]:
    """(a gradient of results [T, H, V], results in float64, the inputs' gradients) of a stream's sequences, each
    computed alone."""
    grad = torch.randn(len(inputs.x), sizes.heads, sizes.values, generator=torch.Generator().manual_seed(1))
    exact, expected = leaves(inputs, torch.float64), torch.zeros_like(grad, dtype=torch.float64)
    for rows in rows_of_sequences(stream(holders=holders, prefixes=prefixes)):  # of a shared row, equal in each of them
        expected = expected.index_copy(0, rows, by_transformers(exact.at(rows), sizes))
    return grad, expected.detach(), torch.autograd.grad(expected, exact, grad.double())


def empty_states(count: int, sizes) -> States:
    """Whose contents show where they are read."""
    return States(*(torch.full(shape, float("nan")) for shape in States.shapes(count, TAPS, sizes)))


def of_table(inputs: AnyInputs, sizes, table, states: States) -> Tensor:
    """What the rows of some runs read."""
    return apply_rule(inputs, sizes, Runs(torch.tensor(table), 0, TAPS), states)


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())
