"""Tiers of tests: what runs by default, with `-m long`, and with `-m nightly` (CONTRIBUTING.md says when)."""

from collections.abc import Collection, Iterable

import pytest


def by_default(rows: Iterable, chosen: Collection) -> list:
    """Rows for `parametrize`: those that are `chosen` run by default, the others are `long`.

    A row is one value, or a tuple of the values of several parameters.
    """
    rows = list(rows)
    unknown = [row for row in chosen if row not in rows]
    assert chosen and not unknown, f"{unknown} are no rows of {rows}"
    return [row if row in chosen else long(row) for row in rows]


def long(row):
    """A row that is `long`."""
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long)
