"""Numbers of a plan as people read them; the whole text is compared with docs/ (`tests/docs`)."""

import pytest

from megarl.planning import plan_table


@pytest.mark.parametrize("number, text", [(999, "999"), (1000, "1.00 k"), (494_032_768, "494.03 M"),
                                          (671_030_000_000, "671.03 B"), (1.026e12, "1.03 T")])  # fmt: skip
def test_parameters_have_their_unit(number, text):
    assert plan_table.count(number) == text


def test_ranks_in_a_row_are_a_span():
    assert [plan_table.span(range(*ends)) for ends in ((0, 8), (3, 4))] == ["0-7", "3"]
