"""How many groups a round generates."""

from types import SimpleNamespace

import pytest

from megarl.errors import UsageError
from megarl.rollout.group_collector import SavedGroupCollector, groups_of_round


@pytest.mark.parametrize("wanted, factor, count", [
    (4, 1.0, 4), (1, 1.5, 2), (3, 1.5, 5), (10, 1.1, 11), (100, 1.1, 110), (30, 1.3, 39), (7, 2.0, 14), (1, 1.01, 2),
])  # fmt: skip
def test_a_round_is_rounded_up(wanted, factor, count):
    """10 · 1.1 is 11.000000000000002 in binary, and not 12 groups."""
    assert groups_of_round(wanted, factor) == count


FIVE_WAITED = SimpleNamespace(path="runs/mine", records={2: SimpleNamespace(waiting=5)})


def collector(waiting: int) -> SavedGroupCollector:
    """A collector with that many complete groups of a batch of six, which begins with a step after five waited."""
    found = SavedGroupCollector.__new__(SavedGroupCollector)
    found.settings, found.role_groups = SimpleNamespace(prompts_per_step=6), SimpleNamespace(ranks=range(3, 5))
    found.group_buffer, found.partial_rollouts = [None] * waiting, {"unfinished": 1}
    found._saved = FIVE_WAITED
    return found


@pytest.mark.parametrize("waiting", [5, 6])
def test_groups_that_waited_are_there(waiting):
    """Six: the checkpoint has the whole batch."""
    started = collector(waiting)
    started.check_start(2)
    assert not started.partial_rollouts, "what continues them is in the files"


@pytest.mark.parametrize("waiting", [0, 4])
def test_groups_that_wait_must_be_there(waiting):
    with pytest.raises(UsageError) as caught:
        collector(waiting).check_start(2)
    assert str(caught.value) == (
        f"--load-rollouts runs/mine: 5 groups waited from earlier steps when step 2 was generated, and {waiting} do "
        "now; start from that step's checkpoint, or from the first step"
    )
    assert caught.value.reporting_rank == 3
