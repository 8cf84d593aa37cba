"""Routes of a micro-batch: which tokens have a route, and mismatched routes."""

import pytest
import torch

from megarl.batch import SharedPrefix
from megarl.mcore.attention.packing import routed_tokens
from megarl.mcore.model.forward_pass import inference_mode, token_scores
from megarl.mcore.moe.router import check_recomputed, moe_layers_of, routers_of
from megarl.mcore.moe.routes import NO_ROUTE, Routing
from tests.helpers.models.tiny_models import build, join_actor, ragged_tokens
from tests.helpers.worlds import run_world

MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
LENGTHS = [5, 1, 7, 2, 9]


def random_routes(rows: int, layers: int, experts: int = 8, topk: int = 2, seed: int = 0) -> torch.Tensor:
    """[rows, layers, topk] int16, distinct and ascending."""
    noise = torch.rand(rows, layers, experts, generator=torch.Generator().manual_seed(seed))
    return noise.topk(topk, dim=-1).indices.sort(dim=-1).values.to(torch.int16)


def routing_of(model, role_groups, lengths, replayed=None, **changed) -> Routing:
    """Routing of a micro-batch of these sequences on a rank without sequence parallelism."""
    rows = routed_tokens(torch.tensor(lengths), role_groups.pg_collection, False)
    given = {"role": "actor", "layers": moe_layers_of(model), "experts": 8, "rows": rows, "replayed": replayed}
    return Routing(**given | changed)


def tokens_without_routes(rank):
    """Per layer: whether routes were replayed, experts per token, tokens routed live, and the load of the experts."""
    model, _, place = build(MOE)
    tokens, lengths = ragged_tokens(LENGTHS)
    live = routing_of(model, place, LENGTHS)
    with inference_mode(model):
        token_scores(model, tokens, lengths, 1.0, 20, live)
        replayed = random_routes(len(tokens), 2)
        replayed[~live.rows.counted] = NO_ROUTE
        replay = routing_of(model, place, LENGTHS, replayed)
        token_scores(model, tokens, lengths, 1.0, 20, replay)
        again = routing_of(model, place, LENGTHS, live.recorded(2))
        token_scores(model, tokens, lengths, 1.0, 20, again)
    counted = replay.rows.counted
    taken = replay.recorded(2)
    assert torch.equal(taken, replayed) and torch.equal(again.recorded(2), live.recorded(2))
    for place_of_layer, layer in enumerate(replay.layers):
        used = replay.used[layer]
        assert (used[:, 0] < used[:, 1]).all()  # padding, too, works with distinct experts
        assert int(replay.load[place_of_layer].sum()) == 2 * int(counted.sum())
        first = torch.bincount(used[counted].flatten(), minlength=8)
        assert torch.equal(first, replay.load[place_of_layer])
        other = (live.used[layer] != used).any(1) & counted
        assert layer > 1 or int(replay.differs[place_of_layer]) == int(other.sum()) > 0
    first_layer = replay.layers[0]  # what comes in is the same with and without replay
    assert torch.equal(replay.used[first_layer][~counted], live.used[first_layer][~counted])
    assert set(live.used[first_layer][~counted].flatten().tolist()) != {0}
    return int(again.differs.sum()), [int(x) for x in live.differs]


def test_last_tokens_are_routed_live_and_all_others_as_recorded():
    assert run_world(tokens_without_routes, 1) == [(0, [0, 0])]


def rows_of_a_shared_prefix(rank):
    _, place = join_actor(MOE)
    shared = SharedPrefix(torch.tensor([0, 0]), torch.tensor([0, 2]))
    rows = routed_tokens(torch.tensor([3, 4]), place.pg_collection, False, shared)
    fields = rows.token_indices, rows.uses, rows.occurrences.rows, rows.occurrences.sequence, rows.occurrences.counted
    return [field.int().tolist() for field in fields]


def test_a_shared_token_is_routed_once_and_counts_in_each_sequence():
    """The example in the docstring of `routed_tokens`."""
    (found,) = run_world(rows_of_a_shared_prefix, 1)
    token_indices, uses, rows, sequence, counted = found
    assert token_indices == [0, 1, 2, 5, 6] and uses == [2, 2, 0, 1, 0]
    assert rows == [0, 1, 2, 0, 1, 3, 4] and sequence == [0, 0, 0, 1, 1, 1, 1] and counted == [1, 1, 0, 1, 1, 1, 0]


def rows_of_rank(rank, flags: str, lengths: list[int]):
    args, place = join_actor(f"{MOE} {flags}")
    rows = routed_tokens(torch.tensor(lengths), place.pg_collection, args.sequence_parallel)
    assert rows.occurrences.rows.tolist() == list(range(len(rows.uses)))
    assert torch.equal(rows.occurrences.counted, rows.counted) and rows.uses.max() <= 1
    return rows.token_indices.tolist(), rows.counted.tolist(), rows.occurrences.sequence.tolist()


@pytest.mark.parametrize("flags, size", [
    ("--context-parallel-size 2", 2), ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ("--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
])  # fmt: skip
@pytest.mark.parametrize("lengths", [[1], [3, 1, 8], [17, 2, 1, 5]])
def test_every_token_is_routed_on_one_rank(flags, size, lengths):
    rows = [row for rank in run_world(rows_of_rank, size, flags, lengths) for row in zip(*rank, strict=True)]
    ends = torch.tensor(lengths).cumsum(0)
    real = sorted(row for row in rows if row[0] < sum(lengths))
    sequence = [int(torch.searchsorted(ends, token, right=True)) for token in range(sum(lengths))]
    assert real == [(t, t + 1 not in ends.tolist(), sequence[t]) for t in range(sum(lengths))]
    assert all(not counted and of == len(lengths) for place, counted, of in rows if place >= sum(lengths))


def out_of_step(rank):
    """Error messages for routes of other tokens, layers or passes."""
    model, _, place = build(MOE)
    tokens, lengths = ragged_tokens(LENGTHS)
    size, messages = len(tokens), []

    def note(function, *args):
        with pytest.raises(RuntimeError) as caught:
            function(*args)
        messages.append(str(caught.value))

    note(lambda: routing_of(model, place, LENGTHS, random_routes(size - 1, 2)))
    note(lambda: routing_of(model, place, LENGTHS, random_routes(size, 1)))
    note(token_scores, model, tokens, lengths, 1.0, 20, routing_of(model, place, [*LENGTHS, 1]))
    note(token_scores, model, tokens, lengths, 1.0, 20, routing_of(model, place, LENGTHS, layers=(1,)))
    unused = routing_of(model, place, LENGTHS)
    note(unused.check)
    routers_of(model)[1].to_recompute.extend([unused, unused])
    note(check_recomputed, model, "actor")
    return messages


def test_mismatched_routes_are_reported():
    (messages,) = run_world(out_of_step, 1)
    assert messages == [
        "actor: routes of 23 tokens in 2 layers for 24 tokens in MoE layers [1, 2]",
        "actor: routes of 24 tokens in 1 layers for 24 tokens in MoE layers [1, 2]",
        "actor: routes of 25 tokens for 24 in MoE layer 1",
        "actor: no routes for MoE layer 2, only for [1]",
        "actor: 24 tokens were not routed in MoE layers [1, 2], only in []",
        "actor: routes of micro-batches that backward never recomputed, by MoE layer: {2: 2}",
    ]
