"""Metrics of routers from hand-made counts."""

import torch

from megarl.router_replay.routing_metrics import RoutingStatistics, load_imbalance, router_metrics


def tally(load, routed, replayed, differs, losses=None, passes=1) -> RoutingStatistics:
    columns = [torch.tensor(column) for column in (routed, replayed, differs)]
    return RoutingStatistics(torch.tensor(load), *columns, losses or {}, passes)


LOAD = [[0, 0, 0, 0], [4, 4, 4, 4], [16, 0, 0, 0]]  # a dense layer, an even one, a collapsed one
NONE = RoutingStatistics.empty(3, 4, [], "cpu")


def test_imbalance_is_zero_for_equal_load():
    assert load_imbalance(torch.tensor(LOAD[1:])).tolist() == [0.0, 3.0]


def test_load_is_that_of_the_first_pass_and_dense_layers_have_none():
    forward = tally(LOAD, [0, 8, 8], [0, 8, 8], [0, 2, 6])
    losses = {"z_loss": torch.tensor(6.0)}
    training = tally(LOAD[::-1], [0, 4, 8], [0, 4, 4], [0, 4, 4], losses, passes=3)
    assert router_metrics(forward, training, "router", replays=True) == {
        "router/load_imbalance": 1.5, "router/load_imbalance/layer_002": 0.0, "router/load_imbalance/layer_003": 3.0,
        "router/idle_experts": 3 / 8, "router/replayed_fraction": 8 / 12, "router/z_loss": 2.0,
        "router/disagreement": 0.5, "router/disagreement/layer_002": 0.25, "router/disagreement/layer_003": 0.75,
    }  # fmt: skip


def test_a_step_without_a_first_pass_is_measured_in_its_update():
    found = router_metrics(NONE, tally(LOAD, [0, 8, 8], [0, 0, 0], [0, 0, 0]), "critic/router", replays=False)
    assert found["critic/router/load_imbalance"] == 1.5
    assert not any("disagreement" in name or "replayed" in name for name in found)


def test_losses_of_a_step_without_an_update_have_no_mean():
    """The actor's updates are left out while the critic warms up, but its model has scored the responses."""
    training = tally([[0, 0, 0, 0]] * 3, [0, 0, 0], [0, 0, 0], [0, 0, 0], {"z_loss": torch.tensor(0.0)}, passes=0)
    found = router_metrics(tally(LOAD, [0, 8, 8], [0, 0, 0], [0, 0, 0]), training, "router", replays=False)
    assert found["router/load_imbalance"] == 1.5 and "router/z_loss" not in found


def test_without_a_pass_there_are_no_routing_metrics():
    assert router_metrics(NONE, NONE, "router", replays=True) == {}
