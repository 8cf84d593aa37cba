"""The routes that a rank holds, by token. What routers do with them is tested in tests/unit/mcore/moe and programs."""

from types import SimpleNamespace

import torch

from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.router_replay.router_state import RouterState, RouteTable


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
