"""Which ranks generate ahead of training, and the layouts in which some rank could not."""

import types

import pytest

from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.trainers.generation_lag import check_lead, leading_ranks

LAG = {"generation_lag": 1}


def roles(**ranks: tuple[int, int]) -> dict:
    return {name: types.SimpleNamespace(ranks=range(*of_role)) for name, of_role in ranks.items()}


@pytest.mark.parametrize("refreshed, ahead", [(0, {2, 3, 4}), (4, {2, 3})])
def test_frozen_roles_lead_unless_they_wait_for_weights(refreshed, ahead):
    settings = Settings(**LAG, reference_update_interval=refreshed)
    found = roles(actor=(0, 2), rollout=(2, 4), reward=(0, 1), reference=(4, 5))
    assert leading_ranks(settings, found) == ahead
    check_lead(settings, found)


@pytest.mark.parametrize("flags, ranks, says", [
    ({}, {"actor": (0, 2), "rollout": (1, 3), "reward": (0, 1)}, "on other ranks than the actor"),
    ({}, {"actor": (0, 2), "rollout": (2, 4), "reward": (1, 3)}, "the reward shares ranks with the rollout"),
    ({"group_filter": "reward"}, {"actor": (0, 2), "rollout": (2, 4), "reward": (0, 2)},
     "--group-filter needs the scores"),
    ({"reference_update_interval": 2}, {"actor": (0, 1), "rollout": (1, 3), "reference": (2, 3), "reward": (1, 2)},
     "than the reference (--reference-update-interval 2)"),
])  # fmt: skip
def test_a_rank_that_cannot_have_one_lead_is_refused(flags, ranks, says):
    with pytest.raises(UsageError) as caught:
        check_lead(Settings(**LAG, **flags), roles(**ranks))
    assert str(caught.value).startswith("--generation-lag 1: ") and says in str(caught.value)
    check_lead(Settings(**flags), roles(**ranks))  # without a lag
