"""Routers: gates and gradient of replay, recomputation, models of one process, numbers of layers."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megarl.mcore.model.forward_pass import token_scores
from megarl.mcore.model.gpt import build_frozen_model
from megarl.mcore.moe.router import moe_layers_of, recording_routes, routers_of
from megarl.mcore.moe.routes import NO_ROUTE, Routing
from tests.helpers.models.routings import LENGTHS, MOE, random_routes, routing_of
from tests.helpers.models.tiny_models import build, build_stages, ragged_tokens
from tests.helpers.worlds import on_each_rank


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@on_each_rank()
def test_gates_of_replayed_experts_are_live_and_trained(rank, scoring):
    model, _, place = build(f"{MOE} --moe-router-score-function {scoring}")
    layer, (_, lengths) = model.decoder.layers[1].mlp, ragged_tokens(LENGTHS)
    tokens = int(lengths.sum())
    routing = routing_of(model, place, LENGTHS, random_routes(tokens, 2))
    routing.replayed[~routing.rows.counted] = NO_ROUTE
    hidden = torch.randn(tokens, 1, 64, generator=torch.Generator().manual_seed(1))
    upward = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2))
    weight = layer.router.weight
    found = []
    for by_formula in (False, True):
        x = hidden.clone().requires_grad_()
        weight.grad = None
        if by_formula:
            output = formula(layer, x.squeeze(1), routing, scoring)
        else:
            with layer.router.routed(routing):
                output = layer(x)[0].squeeze(1)
        (output * upward).sum().backward()
        found.append((output.detach(), x.grad.squeeze(1), weight.grad.clone()))
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]
    assert max(errors) < 1e-5


def formula(layer, x, routing: Routing, scoring: str):
    """Σ g_i E_i(x), gates of live scores over the replayed set alone (2510.11370 §3; sigmoid: 2412.19437 eq. 13)."""
    scores = x @ layer.router.weight.T
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    live = scores.topk(2, dim=1).indices
    indices = torch.where(routing.rows.counted.unsqueeze(1), routing.replayed[:, 1].long(), live)
    chosen.scatter_(1, indices, True)
    raw = scores.exp() if scoring == "softmax" else scores.sigmoid()
    gates = raw * chosen / (raw * chosen).sum(1, keepdim=True)
    outputs = [expert(x, torch.ones(len(x)))[0] for expert in layer.experts.local_experts]
    return sum(gates[:, i : i + 1] * output for i, output in enumerate(outputs))


@on_each_rank()
def test_a_recomputation_counts_no_token_again(rank):
    model, _, place = build(MOE)
    tokens, lengths = ragged_tokens(LENGTHS)
    routing, found = routing_of(model, place, LENGTHS, random_routes(len(tokens), 2)), []
    for _ in range(2):
        token_scores(model, tokens, lengths, 1.0, 20, routing)
        found += [routing.load.clone(), routing.differs.clone()]
    load, differs, load_again, differs_again = found
    assert load.sum() > 0 and torch.equal(load, load_again)
    assert differs.sum() > 0 and torch.equal(differs, differs_again)


@on_each_rank()
def test_models_of_a_process_do_not_share_routers(rank):
    """Sizes of Megarl's and Megatron's list of routers while models are built, and while one of them records."""
    sizes = lambda: len(RouterReplay.global_router_replay_instances)  # noqa: E731
    model, args, place = build(MOE)
    found = [sizes()]
    other = build_frozen_model(args, 20, place.pg_collection)
    found.append(sizes())
    with recording_routes(model):
        found.append(sizes())
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        actions = [[r.router_replay.router_replay_action for r in routers_of(m)] for m in (model, other)]
        assert actions == [[RouterReplayAction.RECORD] * 2, [None] * 2]
        assert model.config.moe_enable_routing_replay and not other[0].config.moe_enable_routing_replay
    assert not model.config.moe_enable_routing_replay
    assert all(r.router_replay.router_replay_action is None for r in routers_of(model))
    assert all(r.router_replay.replay_backward_list == [] for r in routers_of(model))
    assert [*found, sizes()] == [0, 0, 2, 0]


@pytest.mark.parametrize("flags, expected", [
    ("--moe-layer-freq [0,0,1,1,1,1,1,1]", [(3, 4), (5, 6, 7, 8)]),
    ("--moe-layer-freq [0,0,1,1,1,1,1,1] --num-layers-per-virtual-pipeline-stage 2", [(5, 6), (3, 4, 7, 8)]),
    ("--moe-layer-freq 2", [(1, 3), (5, 7)]),
])  # fmt: skip
@on_each_rank(2)
def test_layers_are_numbered_over_the_whole_model(rank, flags, expected):
    stages, _, place = build_stages(f"{MOE} --num-layers 8 --pipeline-model-parallel-size 2 {flags}")
    assert dist.get_rank(place.pg_collection.pp) == rank and moe_layers_of(stages) == expected[rank]
