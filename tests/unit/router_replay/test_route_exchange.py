"""Routes between ranks: all requested routes arrive as recorded, from the ranks that hold them; no others are sent."""

import contextlib
import random

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Batch, concatenate
from megarl.router_replay.route_exchange import RouteExchange
from megarl.router_replay.route_table import RouteTable, check_rows
from tests.helpers.batches import create_mesh, random_batch, share_of
from tests.helpers.worlds import RankFailed, run_world

TOPK, EXPERTS = 3, 300
LAYERS = (2, 3, 5, 8, 9, 11)  # the others are dense
ONE = "critic=0;reward=0;reference=0"
LAYOUTS = [
    "",
    f"--role-map actor=0-1;{ONE};rollout=2-3",
    f"--role-map actor=0-1;{ONE};rollout=2-3 --rollout-pipeline-model-parallel-size 2",
    f"--role-map actor=0-3;{ONE};rollout=3 --actor-pipeline-model-parallel-size 4"
    " --rollout-pipeline-model-parallel-size 1",
    f"--role-map actor=1-2;{ONE};rollout=0-3 --actor-pipeline-model-parallel-size 2"
    " --rollout-tensor-model-parallel-size 2 --rollout-pipeline-model-parallel-size 1",
    "--role-map actor=0-2;critic=0;reward=0;reference=2-3;rollout=1-3 --reference-tensor-model-parallel-size 2",
    f"--role-map actor=2-3;{ONE};rollout=0-1 --rollout-tensor-model-parallel-size 2",
]
OTHERS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "gather", "send")


def truth_of(seed: int, count: int) -> tuple[Batch, torch.Tensor]:
    """A whole batch whose tokens are their own indices, and the routes [T, layers, k] of all of them."""
    whole = random_batch(seed, ["tokens"], ids=torch.arange(count))
    total, generator = len(whole.tokens), torch.Generator().manual_seed(seed)
    whole.tokens = torch.arange(total)
    chances = torch.rand(total, len(LAYERS), EXPERTS, generator=generator)
    routes = chances.topk(TOPK).indices.sort().values.to(torch.int16)
    routes[whole.cu_seqlens[1:] - 1] = -1
    return whole, routes


def split_layers(role_groups, seed: int) -> tuple[int, ...]:
    """Layers dealt to pipeline stages at random, in any order; a stage may have none."""
    if not role_groups.is_member:
        return ()
    dealt, stages = random.Random(f"{role_groups.role} {seed}"), dist.get_world_size(role_groups.pg_collection.pp)
    held = [layer for layer in LAYERS if dealt.randrange(stages) == dist.get_rank(role_groups.pg_collection.pp)]
    return tuple(dealt.sample(held, len(held)))


def columns(layers) -> list[int]:
    return [LAYERS.index(layer) for layer in layers]


@contextlib.contextmanager
def watched():
    """The splits of every all-to-all that runs inside; any other way to talk fails."""
    calls, originals = [], {name: getattr(dist, name) for name in (*OTHERS, "all_to_all_single")}

    def counted(output, source, sizes=None, *args, **kwargs):
        calls.append(sizes)
        return originals["all_to_all_single"](output, source, sizes, *args, **kwargs)

    for name in OTHERS:
        setattr(dist, name, None)
    dist.all_to_all_single = counted
    yield calls
    for name, original in originals.items():
        setattr(dist, name, original)


def send_at_random(mesh, destination: str, seed: int) -> dict:
    """One random exchange compared with the recorded routes; returns what this rank moved."""
    whole, truth = truth_of(seed, seed % 12)
    generator = torch.Generator().manual_seed(seed)
    dp_assignment = {
        role: torch.randint(0, len(mesh[role].replicas), (len(whole),), generator=generator)
        for role in ("rollout", destination)
    }
    layers = {role: split_layers(mesh[role], seed) for role in ("rollout", destination)}
    exchange = RouteExchange(mesh, layers, TOPK, EXPERTS)
    source, batch = (share_of(whole, mesh[role], dp_assignment) for role in ("rollout", destination))
    if source is not None:
        source.routes = truth[source.tokens][:, columns(layers["rollout"])]
    wanted = None
    if batch is not None:
        generator.manual_seed(100 * seed + mesh.rank)
        wanted = torch.rand(len(batch.tokens), generator=generator) < random.Random(seed).choice([0.0, 0.3, 0.8, 1.0])
        wanted[batch.cu_seqlens[1:] - 1] = False
    everyone = [None] * mesh.size
    dist.all_gather_object(everyone, layers)
    with watched() as calls:
        table = exchange.send(source, destination, batch, wanted, dp_assignment)
    if source is None and batch is None:
        assert table is None and not calls
        return {"bystander": True}
    assert len(calls) == 3
    if batch is None:
        assert table is None and not sum(calls[-1]) and not exchange.bytes_received
        return {"gives": True}
    check_table(table, truth[batch.tokens][:, columns(layers[destination])], wanted)
    replicas = dp_assignment["rollout"][batch.sequence_ids].repeat_interleave(batch.lengths)[wanted]
    return check_bytes(mesh, destination, everyone, replicas, calls[-1], exchange.bytes_received)


def check_table(table: RouteTable, truth: torch.Tensor, wanted: torch.Tensor):
    """Exactly the wanted rows are there, and they are the truth."""
    assert table.rows.dtype == torch.int16 and table.rows.shape == (int(wanted.sum()), *truth.shape[1:])
    assert torch.equal(table.index >= 0, wanted)
    places = torch.randperm(len(wanted) + 3)  # the last three are padding
    padded = torch.cat([truth.masked_fill(~wanted[:, None, None], -1), truth.new_full((3, *truth.shape[1:]), -1)])
    assert torch.equal(table.of(places), padded[places])


def check_bytes(mesh, destination: str, held: list[dict], replicas, sizes: list[int], received: int) -> dict:
    """Each replica's ranks send its rows of the layers once; this rank's own layers come from itself."""
    ranks, me = dist.get_process_group_ranks(mesh.channel(f"routes/{destination}")), mesh.rank
    sent, mine = dict(zip(ranks, sizes, strict=True)), set(held[me][destination])
    for dp_rank, members in enumerate(mesh["rollout"].replicas):
        unit = 2 * TOPK * int((replicas == dp_rank).sum())  # bytes of a layer
        assert sum(sent[rank] for rank in members) == unit * len(mine)
        for rank in members:
            assert sent[rank] % max(unit, 1) == 0 and sent[rank] <= unit * len(mine & set(held[rank]["rollout"]))
            if rank == me:
                assert sent[rank] == unit * len(mine & set(held[me]["rollout"]))
    assert received == sum(sizes) - sent[me]
    return {"wire": received, "self": sent[me], "layers": len(mine), "rows": len(replicas), "from": sent}


def all_layouts(rank):
    found = []
    for flags in LAYOUTS:
        mesh = create_mesh(f"--num-layers 4 {flags}")
        for destination in ("actor", "reference") if "reference=2-3" in flags else ("actor",):
            union = sorted({*mesh["rollout"].ranks, *mesh[destination].ranks})
            if rank in union:
                assert dist.get_process_group_ranks(mesh.channel(f"routes/{destination}")) == union
            found.append([send_at_random(mesh, destination, seed) for seed in range(5)])
    return found


def test_every_rank_gets_what_it_asks_for():
    results = run_world(all_layouts, 4)
    flat = [case for result in results for cases in result for case in cases]
    for kind in ("bystander", "gives", "wire", "self"):
        assert any(case.get(kind) for case in flat), kind
    takes = [case for case in flat if "layers" in case]
    assert any(not case["rows"] for case in takes) and any(case["rows"] and not case["layers"] for case in takes)
    # Two tensor-parallel ranks of the rollout hold the same: each serves one rank of the actor.
    served = [{giver for case in result[-1] for giver, size in case["from"].items() if size} for result in results[2:]]
    assert served == [{0}, {1}]


def test_rows_of_a_route_table():
    rows = torch.tensor([[[1, 4]], [[0, 2]]], dtype=torch.int16)
    table = RouteTable(rows, torch.tensor([1, -1, 0]))
    assert table.of(torch.tensor([2, 0, 1, 3, 9])).tolist() == [[[1, 4]], [[0, 2]], [[-1, -1]], [[-1, -1]], [[-1, -1]]]
    assert table.of(torch.zeros(0, dtype=torch.int64)).shape == (0, 1, 2)
    nothing = RouteTable(rows[:0], torch.full((3,), -1))
    assert nothing.of(torch.tensor([0, 3])).tolist() == [[[-1, -1]]] * 2 and nothing.rows.dtype == torch.int16


@pytest.mark.parametrize("bad", [[-1, -1, -1], [-1, 2, 5], [0, 1, 300], [0, 4, 4]])
def test_invalid_routes(bad):
    rows = torch.tensor([0, 1, 299], dtype=torch.int16).repeat(5, 2, 1)
    check_rows("actor", rows, (3, 7), EXPERTS)
    check_rows("actor", rows[:, :0], (), EXPERTS)
    rows[1, 1] = rows[4, 1] = torch.tensor(bad, dtype=torch.int16)
    with pytest.raises(RuntimeError, match=r"actor: of 5 routes .* 3 ascending experts from 0 to 299 \(layer 7: 2\)"):
        check_rows("actor", rows, (3, 7), EXPERTS)


def without(batch: Batch, number: int) -> Batch:
    found = batch.select((batch.sequence_ids != number).nonzero().flatten())
    found.routes = torch.zeros(len(found.tokens), 2, TOPK, dtype=torch.int16)
    return found


def rejections(rank):
    """Everything that one rank alone can see, on a world of one."""
    mesh, layers = create_mesh(""), {"rollout": (2, 4), "actor": (2, 4)}
    whole, _ = truth_of(7, 4)
    whole.lengths = torch.tensor([3, 2, 1, 4])
    whole.tokens = torch.arange(10)
    wanted = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 0]).bool()
    routes = torch.tensor([0, 5, 9], dtype=torch.int16).repeat(10, 2, 1)
    exchange, dp_assignment = RouteExchange(mesh, layers, TOPK, 10), {"rollout": torch.zeros(4, dtype=torch.int64)}

    def is_rejected(text, routes=routes, wanted=wanted, source=whole, **changes):
        source.routes = routes
        same = {"sequence_ids": whole.sequence_ids, "lengths": whole.lengths, "tokens": whole.tokens}
        batch = Batch(**same | changes)
        with pytest.raises(RuntimeError, match=text):
            exchange.send(source, "actor", batch, wanted, dp_assignment)

    is_rejected(r"rollout: no routes of MoE layers \[2, 4\] were recorded", None)
    with pytest.raises(RuntimeError, match="were recorded, 0 of 2 layers"):
        exchange.send(None, "actor", whole, wanted, dp_assignment)
    for shape in ((9, 2, TOPK), (10, 1, TOPK), (10, 2, TOPK + 1)):
        text = rf"layers \[2, 4\] have shape \[{', '.join(map(str, shape))}\], .* 10 tokens, 2 layers and 3 experts"
        is_rejected(text, torch.zeros(shape, dtype=torch.int16))
    other = wanted.clone()
    other[9] = True
    is_rejected(
        r"actor: routes of MoE layers \[2, 4\] .* up to a sequence's last token, .* in 1 of 3 token", wanted=other
    )
    is_rejected(r"actor: routes of MoE layers \[2, 4\] are requested for sequence 4, .* hold 0 to 3 .1 of 3 token",
            sequence_ids=torch.tensor([0, 1, 2, 4]))  # fmt: skip
    is_rejected(r"rollout: actor requests routes of MoE layers \[2, 4\] for sequence 1, .* the 3 of this .* .1 of 3 to",
            routes[:8], source=without(whole, 1))  # fmt: skip
    is_rejected(r"MoE layers \[2, 4\] for actor: sequence 3 has 4 tokens in the rollout and 5 in actor .1 of 3 token",
            lengths=torch.tensor([3, 2, 1, 5]))  # fmt: skip
    late = routes.clone()
    late[[4, 7], 1] = -1  # of a last token that is not requested, and of one that is
    is_rejected(
        r"actor: of 6 routes of the rollout .* 0 to 9 .layer 4: 1.; the first, of layer 4, is \[-1, -1, -1\]", late
    )
    whole.routes = routes
    assert exchange.send(whole, "actor", whole, wanted, dp_assignment).rows.shape == (6, 2, 3)
    lacking = "actor: routes of MoE layers [6, 8] (2 of 3) are on no rank of the rollout's replica 0, which has "
    with pytest.raises(RuntimeError) as error:
        RouteExchange(mesh, layers | {"actor": (8, 2, 6)}, TOPK, EXPERTS)
    assert str(error.value) == lacking + "layers [2, 4]"


def test_wrong_routes_are_reported_at_once():
    run_world(rejections, 1)


def ask_for_what_is_not_there(rank):
    mesh = create_mesh("--role-map actor=1;critic=1;reward=1;reference=1;rollout=0")
    whole, _ = truth_of(7, 4)
    whole.lengths, whole.tokens = torch.tensor([3, 2, 1, 4]), torch.arange(10)
    exchange = RouteExchange(mesh, {"rollout" if rank == 0 else "actor": (2, 4)}, TOPK, EXPERTS)
    wanted = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 0]).bool()
    dp_assignment = {"rollout": torch.zeros(4, dtype=torch.int64)}
    exchange.send(without(whole, 1) if rank == 0 else None, "actor", whole if rank else None, wanted, dp_assignment)


def test_missing_moe_layers_are_reported():
    with pytest.raises(RankFailed, match=r"rank 0 of 2 raised:[\s\S]*rollout: actor requests routes of MoE layers"):
        run_world(ask_for_what_is_not_there, 2)


def test_routes_stay_with_their_sequences_in_a_batch():
    whole, truth = truth_of(3, 6)
    whole.routes = truth
    parts = [whole.select(torch.tensor(index)) for index in ([4, 1], [0, 5, 3, 2])]
    assert all(torch.equal(part.routes, truth[part.tokens]) for part in parts)
    joined = concatenate(parts)
    assert torch.equal(joined.routes, truth) and joined.routes.dtype == torch.int16
