"""How a folder's files hold a tensor: as it is, or quantized; slices of it are read as if it were as it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Index = tuple[Any, ...]  # an expert (int) of a tensor that stacks them, then a slice with begin and end of each axis
ReadStored = Callable[[str, Index], Tensor]  # (name, index) -> a slice of a tensor as the file holds it

GROUP = 32  # values of MXFP4 with one scale
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_EXPONENT = 255  # of an e8m0 scale


class StoredTensor(NamedTuple):
    """A tensor as it is in a file."""

    file: str  # name in the folder
    dtype: str  # as safetensors names it: F32, BF16, F16 …
    shape: tuple[int, ...]


class Fp8Tensor(NamedTuple):
    """A matrix [out, in], or one of each expert [E, out, in], in e4m3 with a scale for each block (2412.19437 §3.3),
    which may be a row or the whole matrix.

    A value is the product of number and scale, rounded to fp32, as transformers' dequantization computes it.
    """

    file: str  # that has the numbers
    dtype: str  # in which exports have it
    shape: tuple[int, ...]
    stored: tuple[str, str]  # names of the numbers and of the scales [⌈out / rows⌉, ⌈in / columns⌉]
    block: tuple[int, int]  # rows and columns
    axes: int  # of the scales; those of a whole matrix may have none, or one

    def read(self, read: ReadStored, index: Index) -> Tensor:
        """A slice, in fp32."""
        *expert, rows, columns = index
        numbers, scales = self.stored
        places = [_blocks(part, size) for part, size in zip((rows, columns), self.block, strict=True)]
        within = [part for part, _ in places]
        of_rows, of_columns = (positions for _, positions in places)
        place = (*expert, *within)
        of_blocks = read(scales, place[len(place) - self.axes :]).float().reshape([x.stop - x.start for x in within])
        return read(numbers, index).float().mul_(of_blocks[of_rows][:, of_columns])


class Mxfp4Tensor(NamedTuple):
    """A matrix of each expert [E, in, out] in MXFP4 (OCP Microscaling 1.0): e2m1 numbers with a scale, a power of two,
    for each 32 of them along `in`.

    The files have the transposed matrices: blocks [E, out, in / 32, 16], two numbers in a byte, the first in its low
    bits, and scales [E, out, in / 32], exponents with a bias of 127. All values are exact in fp32 and bf16.
    """

    file: str  # that has the blocks
    dtype: str  # in which exports have it
    shape: tuple[int, ...]
    stored: tuple[str, str]  # names of blocks and scales

    def read(self, read: ReadStored, index: Index) -> Tensor:
        """A slice, in fp32."""
        expert, columns, rows = index
        blocks, scales = self.stored
        groups, _ = _blocks(columns, GROUP)
        numbers = _PAIRS[read(blocks, (expert, rows, groups, slice(0, GROUP // 2))).int()]  # [out, groups, 16, 2]
        factors = _POWERS[read(scales, (expert, rows, groups)).int()]
        values = numbers.flatten(2).mul_(factors[..., None]).flatten(1)
        first = groups.start * GROUP
        return values[:, columns.start - first : columns.stop - first].t()


QuantizedTensor = Fp8Tensor | Mxfp4Tensor
FolderTensor = StoredTensor | QuantizedTensor

_SIGNED = FP4 + tuple(-value for value in FP4)
_PAIRS = torch.tensor([(_SIGNED[byte & 15], _SIGNED[byte >> 4]) for byte in range(256)])
_POWERS = torch.tensor([2.0 ** (exponent - 127) for exponent in range(NAN_EXPONENT)] + [torch.nan])


def _blocks(part: slice, size: int) -> tuple[slice, Tensor]:
    """The blocks of `size` in which positions lie, and for each position its block, counted from the first of them."""
    first = part.start // size
    positions = torch.arange(part.start, part.stop, part.step or 1)
    return slice(first, -(-part.stop // size)), positions // size - first
