"""The routes that a rank holds, by token. What routers do with them is tested in tests/unit/mcore/moe and programs."""

from types import SimpleNamespace

import torch

from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.router_replay.router_state import (
    RouterState,
    RouteTable,
    RoutingStatistics,
    load_imbalance,
    router_metrics,
)


def test_rows_of_a_route_table():
    rows = torch.tensor([[[1, 4]], [[0, 2]]], dtype=torch.int16)
    table = RouteTable(rows, torch.tensor([1, -1, 0]))
    assert table.of(torch.tensor([2, 0, 1, 3, 9])).tolist() == [[[1, 4]], [[0, 2]], [[-1, -1]], [[-1, -1]], [[-1, -1]]]
    assert table.of(torch.zeros(0, dtype=torch.int64)).shape == (0, 1, 2)
    nothing = RouteTable(rows[:0], torch.full((3,), -1))
    assert nothing.of(torch.tensor([0, 3])).tolist() == [[[-1, -1]]] * 2 and nothing.rows.dtype == torch.int16


def test_experts_are_counted_in_each_layer_of_a_module_of_which_some_have_no_attention():
    module = SimpleNamespace(routed_layers=lambda: (RoutedLayers((2, 4, 6), 3, 1), None))
    args = SimpleNamespace(model_folder=module, num_layers=3, sequence_parallel=False)
    vars(args).update(
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, num_experts=None
    )
    groups = SimpleNamespace(pg_collection=SimpleNamespace(cp=None))
    state = RouterState(SimpleNamespace(name="actor", megatron=args), groups, torch.nn.Module())
    rows = SimpleNamespace(uses=torch.ones(5, dtype=torch.int64))
    routing = SimpleNamespace(layers=(2, 4, 6), load=torch.tensor([[5, 0, 0], [0, 5, 0], [1, 2, 2]]), rows=rows)
    routing = SimpleNamespace(**vars(routing), replayed=None, losses={}, check=lambda: None)
    state.add_statistics([(SimpleNamespace(routing=routing), None)], trained=False)
    assert state._forward.load[[1, 3, 5]].tolist() == routing.load.tolist()
    assert state._forward.routed.tolist() == [0, 5, 0, 5, 0, 5]


# -- metrics of routers from hand-made counts --------------------------------------------------------------------------


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
