"""Routes of a micro-batch: which tokens have a route, and mismatched routes."""

import pytest
import torch

from megarl.batch import SharedPrefix
from megarl.mcore.attention.packing import routed_tokens
from megarl.mcore.model.forward_pass import inference_mode, token_scores
from megarl.mcore.moe.router import check_recomputed, routers_of
from megarl.mcore.moe.routes import NO_ROUTE
from tests.helpers.models.routings import LENGTHS, MOE, random_routes, routing_of
from tests.helpers.models.tiny_models import build, join_actor, ragged_tokens
from tests.helpers.worlds import on_each_rank, run_world


@on_each_rank()
def test_last_tokens_are_routed_live_and_all_others_as_recorded(rank):
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
    assert not again.differs.any() and not live.differs.any()


@on_each_rank()
def test_a_shared_token_is_routed_once_and_counts_in_each_sequence(rank):
    """The example in the docstring of `routed_tokens`."""
    _, place = join_actor(MOE)
    shared = SharedPrefix(torch.tensor([0, 0]), torch.tensor([0, 2]))
    rows = routed_tokens(torch.tensor([3, 4]), place.pg_collection, False, shared)
    fields = rows.token_indices, rows.uses, *rows.occurrences
    found = [field.int().tolist() for field in fields]
    token_indices, uses, rows, sequence, counted = found
    assert token_indices == [0, 1, 2, 5, 6] and uses == [2, 2, 0, 1, 0]
    assert rows == [0, 1, 2, 0, 1, 3, 4] and sequence == [0, 0, 0, 1, 1, 1, 1] and counted == [1, 1, 0, 1, 1, 1, 0]


def rows_of_rank(rank, flags: str):
    args, place = join_actor(f"{MOE} {flags}")
    for lengths in BATCHES:
        rows = routed_tokens(torch.tensor(lengths), place.pg_collection, args.sequence_parallel)
        at, sequence, counted = rows.occurrences
        assert at.tolist() == list(range(len(rows.uses)))
        assert torch.equal(counted, rows.counted) and rows.uses.max() <= 1
        yield [*zip(rows.token_indices.tolist(), rows.counted.tolist(), sequence.tolist(), strict=True)]


BATCHES = [1], [3, 1, 8], [17, 2, 1, 5]


@pytest.mark.parametrize("flags, size", [
    ("--context-parallel-size 2", 2), ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ("--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
])  # fmt: skip
def test_every_token_is_routed_on_one_rank(flags, size):
    found = run_world(lambda rank: [*rows_of_rank(rank, flags)], size)
    for lengths, *of_ranks in zip(BATCHES, *found, strict=True):
        rows, ends = [row for of_rank in of_ranks for row in of_rank], torch.tensor(lengths).cumsum(0)
        real = sorted(row for row in rows if row[0] < sum(lengths))
        sequence = [int(torch.searchsorted(ends, token, right=True)) for token in range(sum(lengths))]
        assert real == [(t, t + 1 not in ends.tolist(), sequence[t]) for t in range(sum(lengths))]
        assert all(not counted and of == len(lengths) for place, counted, of in rows if place >= sum(lengths))


@on_each_rank()
def test_mismatched_routes_are_reported(rank):
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
    assert messages == [
        "actor: routes of 23 tokens in 2 layers for 24 tokens in MoE layers [1, 2]",
        "actor: routes of 24 tokens in 1 layers for 24 tokens in MoE layers [1, 2]",
        "actor: routes of 25 tokens for 24 in MoE layer 1",
        "actor: no routes for MoE layer 2, only for [1]",
        "actor: 24 tokens were not routed in MoE layers [1, 2], only in []",
        "actor: routes of micro-batches that backward never recomputed, by MoE layer: {2: 2}",
    ]
