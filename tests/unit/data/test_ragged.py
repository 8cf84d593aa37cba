"""Rows of unequal length in flat arrays."""

import pytest

from megarl.data.ragged import Ragged


def test_rows_of_unequal_length():
    rows = Ragged.of_rows(iter([[1, 2], [], [3]]))
    assert list(rows) == [[1, 2], [], [3]] and len(rows) == 3 and rows[-1] == [3]
    assert [*rows.view(0), 7] == [1, 2, 7] and rows.view(0).obj is rows.values
    assert list(Ragged.of_arrays(rows.arrays())) == list(rows) and not len(Ragged.of_rows([]))
    with pytest.raises(IndexError):
        rows[3]
