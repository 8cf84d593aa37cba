"""How many groups a round generates."""

import pytest

from megarl.rollout.group_collector import groups_of_round


@pytest.mark.parametrize("wanted, factor, count", [
    (4, 1.0, 4), (1, 1.5, 2), (3, 1.5, 5), (10, 1.1, 11), (100, 1.1, 110), (30, 1.3, 39), (7, 2.0, 14), (1, 1.01, 2),
])  # fmt: skip
def test_a_round_is_rounded_up(wanted, factor, count):
    """10 · 1.1 is 11.000000000000002 in binary, and not 12 groups."""
    assert groups_of_round(wanted, factor) == count
