"""Which rows of a folder's tensors a weight of Megatron consists of.

All weights but the vocabulary's have the same columns in both; `mcore.model.projections` says in which order Megatron
fuses rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from megarl.mcore.model.projections import HeadLayout


class RowRange(NamedTuple):
    """Rows of a weight that are rows of one of the folder's tensors."""

    name: str  # of the tensor in the folder
    row: int  # first row in the weight
    source_row: int  # first row in the folder's tensor
    rows: int
    step: int = 1  # from one row to the next in the folder's tensor
    expert: int | None = None  # of a tensor that stacks experts, [E, rows, columns]
    is_transposed: bool = False  # one that stacks experts is [E, columns, rows]
    has_unit_axes: bool = False  # one of a number of each head is [1, 1, rows, 1]

    def box(self, columns: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of the rows in the weight, whose other axes have these sizes."""
        return (self.row, *[0] * len(columns)), (self.rows, *columns)

    def source_shape(self, columns: Sequence[int], experts: int) -> tuple[int, ...]:
        """The smallest shape of the folder's tensor that holds these rows, and as many experts."""
        rows = self.source_row + (self.rows - 1) * self.step + 1
        shape = (*columns, rows) if self.is_transposed else (rows, *columns)
        shape = (1, 1, rows, 1) if self.has_unit_axes else shape
        return shape if self.expert is None else (experts, *shape)

    def view_of(self, read: Callable[[tuple], Tensor], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box (offset, shape) of the weight, inside these rows, as a view of the folder's tensor. `read`: index ->
        a slice of that tensor."""
        first = (offset[0] - self.row) * self.step + self.source_row
        rows = slice(first, first + (shape[0] - 1) * self.step + 1, self.step)
        columns = [slice(a, a + n) for a, n in zip(offset[1:], shape[1:], strict=True)]
        if self.has_unit_axes:
            return read((0, 0, rows, 0))
        if self.is_transposed:
            return read((self.expert, *columns, rows)).t()
        return read((rows, *columns) if self.expert is None else (self.expert, rows, *columns))


class Rows(NamedTuple):
    """Whole tensors of equal size, one after another."""

    names: tuple[str, ...]
    has_unit_axes: bool = False  # as of `RowRange`

    def ranges(self, rows: int, heads: HeadLayout, expert: int | None) -> list[RowRange]:
        """The ranges of a weight of `rows` rows; `expert`: whose, if any. So in all classes of mappings."""
        each, names = rows // len(self.names), [name.format(expert=expert) for name in self.names]
        found = [RowRange(name, i * each, 0, each) for i, name in enumerate(names)]
        return [part._replace(has_unit_axes=self.has_unit_axes) for part in found]


class StackedExperts(NamedTuple):
    """One tensor of all experts, [E, rows, columns]."""

    names: tuple[str]
    projections: int = 1  # which take turns row by row
    is_transposed: bool = False  # it is [E, columns, rows], or of biases [E, rows]

    def ranges(self, rows: int, heads: HeadLayout, expert: int | None) -> list[RowRange]:
        """The ranges of a weight of `rows` rows; `expert`: whose."""
        (name,), count, is_transposed = self
        each = rows // count
        return [RowRange(name, i * each, i, each, count, expert, is_transposed) for i in range(count)]


class Heads(NamedTuple):
    """Separate tensors of queries, their gates if these have one, keys and values; or one of queries, keys, values.

    Megatron has for each group all queries, all gates, its key, its value. It turns channels i and i + r/2 of the first
    r; of tensors that turn 2i and 2i + 1 it has the even channels first, then the odd ones.
    """

    names: tuple[str, ...]
    gates_follow: bool = False  # in the tensor of queries each head's gate is after it
    turned_in_pairs: float = 0.0  # share of a head's channels, of queries and keys, that neighbours turn together

    @property
    def are_in_order(self) -> bool:
        """Whether each tensor has its rows in Megatron's order."""
        return not self.gates_follow and not self.turned_in_pairs

    def ranges(self, rows: int, heads: HeadLayout, expert: int | None) -> list[RowRange]:
        """The ranges of a weight of `rows` rows."""
        found, row = [], 0
        for group in range(heads.groups):
            for name, source, count in self._of_group(group, heads):
                part = RowRange(name, row, source, count)
                has_pairs = self.turned_in_pairs and name != self.names[-1]
                found += self._pairs(part, heads.channels) if has_pairs else [part]
                row += count
        return found

    def _of_group(self, group: int, heads: HeadLayout) -> list[tuple[str, int, int]]:
        """(tensor, its first row, rows) of a group's parts."""
        queries, size = heads.queries, heads.channels
        if self.gates_follow:
            numbers = range(group * queries, (group + 1) * queries)
            found = [(self.names[0], (2 * query + part) * size, size) for part in (0, 1) for query in numbers]
            return found + [(name, group * size, size) for name in self.names[1:]]
        names, starts = self.names, [0] * len(self.names)
        if len(names) == 1:
            keys = heads.groups * queries * size
            names, starts = names * 3, [0, keys, keys + heads.groups * size]
        sizes = [queries * size] * (len(names) - 2) + [size, size]  # of queries, gates, a key, a value
        return [(name, start + group * n, n) for name, start, n in zip(names, starts, sizes, strict=True)]

    def _pairs(self, part: RowRange, size: int) -> list[RowRange]:
        """The rows of whole heads of `size` channels, of which neighbours turn together."""
        half, found = int(size * self.turned_in_pairs) // 2, []
        for at in range(0, part.rows, size):
            row, source = part.row + at, part.source_row + at
            found += [RowRange(part.name, row + i * half, source + i, half, 2) for i in (0, 1)]
            if rest := size - 2 * half:
                found.append(RowRange(part.name, row + 2 * half, source + 2 * half, rest))
        return found


class RecurrentPart(NamedTuple):
    """A part of a tensor of a layer with a recurrent state.

    Its rows are those of several parts, one after another, or `by_key_head` those of all parts of one key head, then
    those of the next one.
    """

    names: tuple[str]
    parts: tuple[str, ...]  # of the tensor: names of `HeadSizes.parts`
    number: int  # which part
    by_key_head: bool = False

    def ranges(self, rows: int, heads: HeadLayout, expert: int | None) -> list[RowRange]:
        """The ranges of a weight of `rows` rows."""
        sizes = heads.recurrent.parts
        rows_of = [sizes[part] for part in self.parts]
        blocks = heads.recurrent.groups if self.by_key_head else 1
        start, size, period = (sum(x) // blocks for x in (rows_of[: self.number], [rows], rows_of))
        return [RowRange(self.names[0], i * size, i * period + start, size) for i in range(blocks)]


Mapping = Rows | StackedExperts | Heads | RecurrentPart


def rows(*names: str) -> Rows:
    """Whole tensors, one after another."""
    return Rows(names)


def recurrent_parts(name: str, *parts: str, by_key_head: bool = False) -> dict[str, Mapping]:
    """The parts of a tensor of a layer with a recurrent state, by their names."""
    return {part: RecurrentPart((name,), parts, i, by_key_head) for i, part in enumerate(parts)}
