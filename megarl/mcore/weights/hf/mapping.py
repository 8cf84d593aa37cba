"""Which rows of a folder's tensors a weight of Megatron consists of.

All weights but the vocabulary's have the same columns in both. Along the rows, Megatron keeps q, k and v of each key
and value group together (R·D rows of q, D of k, D of v), and all gate rows before all up rows.
"""

from typing import NamedTuple


class HeadLayout(NamedTuple):
    """Attention heads: G groups of R query heads with one key and one value head, D channels each."""

    groups: int
    queries: int  # per group
    channels: int

    @classmethod
    def of(cls, args) -> "HeadLayout":
        """That of a role's Megatron namespace."""
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        return cls(groups, args.num_attention_heads // groups, args.kv_channels)


class RowRange(NamedTuple):
    """Rows of one of the folder's tensors that are consecutive rows of a weight."""

    name: str  # of the tensor in the folder
    row: int  # first row in the weight
    source_row: int  # first row in the folder's tensor
    rows: int

    def box(self, columns: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of the rows in the weight, whose other axes have these sizes."""
        return (self.row, *[0] * len(columns)), (self.rows, *columns)

    def slices(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """What a box (offset, shape) of the weight, inside these rows, is of the folder's tensor."""
        start = (offset[0] - self.row + self.source_row, *offset[1:])
        return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


class Rows(NamedTuple):
    """Whole tensors of equal size, one after another."""

    names: tuple[str, ...]

    def ranges(self, rows: int, heads: HeadLayout) -> list[RowRange]:
        """The ranges of a weight of `rows` rows."""
        each = rows // len(self.names)
        return [RowRange(name, i * each, 0, each) for i, name in enumerate(self.names)]


class Heads(NamedTuple):
    """Separate tensors of queries, keys and values."""

    names: tuple[str, str, str]

    def ranges(self, rows: int, heads: HeadLayout) -> list[RowRange]:
        """The ranges of a weight of `rows` rows."""
        return _by_group(self.names, (0, 0, 0), heads)


class FusedHeads(NamedTuple):
    """One tensor of all queries, then all keys, then all values."""

    names: tuple[str]

    def ranges(self, rows: int, heads: HeadLayout) -> list[RowRange]:
        """The ranges of a weight of `rows` rows."""
        keys = heads.groups * heads.queries * heads.channels
        return _by_group(self.names * 3, (0, keys, keys + heads.groups * heads.channels), heads)


def _by_group(names: tuple[str, ...], starts: tuple[int, ...], heads: HeadLayout) -> list[RowRange]:
    found, row = [], 0
    for group in range(heads.groups):
        for name, start, count in zip(names, starts, (heads.queries, 1, 1), strict=True):
            size = count * heads.channels
            found.append(RowRange(name, row, start + group * size, size))
            row += size
    return found


Mapping = Rows | Heads | FusedHeads


def rows(*names: str) -> Rows:
    """Whole tensors, one after another."""
    return Rows(names)


def heads(query: str, key: str, value: str) -> Heads:
    """Separate tensors of queries, keys and values."""
    return Heads((query, key, value))


def fused_heads(name: str) -> FusedHeads:
    """One tensor of queries, keys and values."""
    return FusedHeads((name,))
