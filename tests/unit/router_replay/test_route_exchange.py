"""Routes between ranks: they flow one way, each once, and arrive as recorded."""

import contextlib
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Batch, concatenate
from megarl.comm.exchange import PendingSends
from megarl.router_replay.route_exchange import RouteExchange, check_rows
from megarl.router_replay.router_state import RouteTable
from tests.helpers.models.batches import create_mesh, random_batch, share_of
from tests.helpers.worlds import RankFailed, on_each_rank, run_world

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
    f"--role-map actor=2-3;{ONE};rollout=0-1 --actor-context-parallel-size 2",
    f"--role-map actor=0-3;{ONE};rollout=0-3 --actor-tensor-model-parallel-size 2 --actor-sequence-parallel"
    " --actor-pipeline-model-parallel-size 2 --rollout-pipeline-model-parallel-size 2",
    f"--role-map actor=2-3;{ONE};rollout=0-1 --rollout-tensor-model-parallel-size 2",
]
OTHERS = ("all_gather", "all_gather_object", "all_reduce", "broadcast", "gather", "send")


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
    """Bytes (received from, sent to) each rank of every all-to-all that runs inside. Ranks with the same layers of a
    replica may gather; any other way to talk fails."""
    calls, originals = [], {name: getattr(dist, name) for name in (*OTHERS, "all_to_all_single")}

    def counted(output, source, received=None, sent=None, **kwargs):
        calls.append((received, sent))
        return originals["all_to_all_single"](output, source, received, sent, **kwargs)

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
    everyone = [None] * mesh.size
    dist.all_gather_object(everyone, layers)
    with watched() as calls:
        table = exchange.send(source, destination, batch, wanted, dp_assignment)
    if source is None and batch is None:
        assert table is None and not calls
        return {"bystander": True}
    (sizes_of_sizes, (received, sent)) = calls
    assert sizes_of_sizes == (None, None)
    if source is None:
        assert not sum(sent)
    if batch is None:
        assert table is None and not sum(received)
        return {"gives": True}
    has_route = torch.ones_like(batch.tokens, dtype=torch.bool)
    has_route[batch.cu_seqlens[1:] - 1] = False
    check_table(table, truth[batch.tokens][:, columns(layers[destination])], wanted & has_route)
    replicas = dp_assignment["rollout"][batch.sequence_ids].repeat_interleave(batch.lengths)[has_route]
    return check_bytes(mesh, destination, everyone, replicas, received)


def check_table(table: RouteTable, truth: torch.Tensor, wanted: torch.Tensor):
    """Exactly the wanted rows are there, and they are the truth."""
    assert table.rows.dtype == torch.int16 and table.rows.shape == (int(wanted.sum()), *truth.shape[1:])
    assert torch.equal(table.index >= 0, wanted)
    places = torch.randperm(len(wanted) + 3)  # the last three are padding
    padded = torch.cat([truth.masked_fill(~wanted[:, None, None], -1), truth.new_full((3, *truth.shape[1:]), -1)])
    assert torch.equal(table.of(places), padded[places])


def check_bytes(mesh, destination: str, held: list[dict], replicas, received: list[int]) -> dict:
    """Each replica's ranks send its rows of the layers once; this rank's own layers come from itself."""
    ranks, me = dist.get_process_group_ranks(mesh.channel(f"routes/{destination}")), mesh.rank
    came, mine = dict(zip(ranks, received, strict=True)), set(held[me][destination])
    group = mesh[destination].pg_collection.tp_cp
    sharing, route = dist.get_world_size(group), 2 * TOPK
    for dp_rank, members in enumerate(mesh["rollout"].replicas):
        rows, of_replica = int((replicas == dp_rank).sum()), sum(came[rank] for rank in members)
        everything = torch.tensor(of_replica)
        dist.all_reduce(everything, group=group)
        assert everything == route * rows * len(mine)
        share = of_replica // (route * len(mine)) if mine else 0
        assert of_replica == route * share * len(mine) and (not mine or rows // sharing <= share <= -(-rows // sharing))
        for rank in members:
            of_both = route * share * len(mine & set(held[rank]["rollout"]))
            assert came[rank] <= of_both and (rank != me or came[rank] == of_both)
    found = {"wire": sum(received) - came[me], "self": came[me], "layers": len(mine), "rows": len(replicas)}
    return found | {"sharing": sharing, "from": came}


def all_layouts(rank):
    found = []
    for flags in LAYOUTS:
        mesh = create_mesh(f"--num-layers 4 {flags}")
        for destination in ("actor", "reference") if "reference=2-3" in flags else ("actor",):
            union = sorted({*mesh["rollout"].ranks, *mesh[destination].ranks})
            if rank in union:
                assert dist.get_process_group_ranks(mesh.channel(f"routes/{destination}")) == union
            found.append([send_at_random(mesh, destination, seed) for seed in (0, 1, 4)])
    return found


def test_every_rank_gets_the_routes_of_its_tokens_and_layers():
    results = run_world(all_layouts, 4)
    flat = [case for result in results for cases in result for case in cases]
    for kind in ("bystander", "gives", "wire", "self"):
        assert any(case.get(kind) for case in flat), kind
    takes = [case for case in flat if "layers" in case]
    assert any(not case["rows"] for case in takes) and any(case["rows"] and not case["layers"] for case in takes)
    assert any(case["wire"] and case["sharing"] == 2 for case in takes)
    # Two tensor-parallel ranks of the rollout hold the same: each serves one rank of the actor.
    served = [{giver for case in result[-1] for giver, size in case["from"].items() if size} for result in results[2:]]
    assert served == [{0}, {1}]


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


def assigned_to_one() -> dict:
    return dict.fromkeys(("rollout", "actor"), torch.zeros(4, dtype=torch.int64))


@on_each_rank()
def test_wrong_routes_are_reported_at_once(rank):
    """Everything that one rank alone can see, on a world of one."""
    mesh, layers = create_mesh(""), {"rollout": (2, 4), "actor": (2, 4)}
    whole, _ = truth_of(7, 4)
    whole.lengths = torch.tensor([3, 2, 1, 4])
    whole.tokens = torch.arange(10)
    wanted = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 0]).bool()
    routes = torch.tensor([0, 5, 9], dtype=torch.int16).repeat(10, 2, 1)
    exchange, dp_assignment = RouteExchange(mesh, layers, TOPK, 10), assigned_to_one()

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
    is_rejected(r"actor: rank 0 of the rollout sent 60 bytes of routes, but 72 are expected: 3 experts of 6 tokens in "
                r"MoE layers \[2, 4\]; the two disagree", routes[:8], source=without(whole, 1))  # fmt: skip
    is_rejected("but 84 are expected: 3 experts of 7 tokens", lengths=torch.tensor([3, 2, 1, 5]))
    late = routes.clone()
    late[[4, 7], 1] = -1  # of a last token, and of one that has a route
    is_rejected(
        r"actor: of 6 routes of the rollout .* 0 to 9 .layer 4: 1.; the first, of layer 4, is \[-1, -1, -1\]", late
    )
    whole.routes = routes
    assert exchange.send(whole, "actor", whole, wanted, dp_assignment).rows.shape == (6, 2, 3)
    lacking = "actor: routes of MoE layers [6, 8] (2 of 3) are on no rank of the rollout's replica 0, which has "
    with pytest.raises(RuntimeError) as error:
        RouteExchange(mesh, layers | {"actor": (8, 2, 6)}, TOPK, EXPERTS)
    assert str(error.value) == lacking + "layers [2, 4]"


def send_too_little(rank):
    mesh = create_mesh("--role-map actor=1;critic=1;reward=1;reference=1;rollout=0")
    whole, _ = truth_of(7, 4)
    whole.lengths, whole.tokens = torch.tensor([3, 2, 1, 4]), torch.arange(10)
    exchange = RouteExchange(mesh, {"rollout" if rank == 0 else "actor": (2, 4)}, TOPK, EXPERTS)
    wanted = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 0]).bool()
    dp_assignment = assigned_to_one()
    exchange.send(without(whole, 1) if rank == 0 else None, "actor", whole if rank else None, wanted, dp_assignment)


def test_missing_sequences_are_reported():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised:[\s\S]*actor: rank 0 of the rollout sent 60 bytes"):
        run_world(send_too_little, 2)


@on_each_rank(2)
def test_the_rollout_does_not_wait_until_its_routes_are_received(rank):
    """Two steps of routes from a rank that generates, to one that receives them only after both are sent."""
    mesh = create_mesh("--role-map actor=1;critic=1;reward=1;reference=1;rollout=0")
    routes, pending = RouteExchange(mesh, {"rollout" if rank == 0 else "actor": LAYERS}, TOPK, EXPERTS), PendingSends()
    steps, store = [truth_of(seed, 4) for seed in (3, 4)], dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["sent"], timedelta(seconds=20))
    for whole, truth in steps:
        whole.routes, wanted = truth, torch.ones_like(whole.tokens, dtype=torch.bool)
        table = routes.send(whole, "actor", whole, wanted, assigned_to_one(), pending)
        assert table is None if rank == 0 else torch.equal(table.of(whole.tokens), truth)
    if rank == 0:
        store.set("sent", "1")
    pending.wait()


def test_routes_stay_with_their_sequences_in_a_batch():
    whole, truth = truth_of(3, 6)
    whole.routes = truth
    parts = [whole.select(torch.tensor(index)) for index in ([4, 1], [0, 5, 3, 2])]
    assert all(torch.equal(part.routes, truth[part.tokens]) for part in parts)
    joined = concatenate(parts)
    assert torch.equal(joined.routes, truth) and joined.routes.dtype == torch.int16
