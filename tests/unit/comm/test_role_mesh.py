"""Role groups and process groups: sizes and members for several layouts, replicas, sharing between roles."""

import math
import os
import socket

import pytest
import torch
import torch.distributed as dist

from megarl.comm import role_mesh
from megarl.mcore.parallel.process_groups import DENSE, EXPERT, GroupCache, ParallelSizes, create_groups, fake_world
from tests.helpers.models.tiny_models import parse_roles
from tests.helpers.worlds import SAFETY, on_each_rank, run_world

NAMES = [*DENSE, *EXPERT, "embd", "pos_embd"]


def describe(rank, flags, program):
    """{role: {group: world ranks}} on this rank, with the attributes of its `RoleGroups`."""
    roles = parse_roles(flags, dist.get_world_size(), program=program)
    here = role_mesh.create_mesh(roles, SAFETY)
    assert (here.rank, here.size) == (rank, dist.get_world_size())
    found = {}
    for name, place in here.roles.items():
        assert place is here[name] and place.role == name and place.rank == rank
        groups = {}
        if place.is_member:
            groups = {g: dist.get_process_group_ranks(getattr(place.pg_collection, g)) for g in NAMES if
                      getattr(place.pg_collection, g) is not None}  # fmt: skip
            assert dist.get_process_group_ranks(place.replica_group) == list(place.replicas[place.dp_rank])
            assert dist.get_rank(place.pg_collection.tp) == groups["tp"].index(rank)
        else:
            assert place.pg_collection is None and place.replica_group is None and place.dp_rank is None
        found[name] = (place.dp_rank, place.is_leader, place.leaders, groups)
    for other in range(here.size):
        assert here.roles_of(other) == [n for n in roles if roles[n].model_role == n and other in roles[n].ranks]
    return found


@pytest.mark.parametrize("flags, place, members", [
    ("", lambda r: (r, True, (0, 1, 2, 3)), lambda r: {"tp mp": [r], "dp tp_dp_cp": [0, 1, 2, 3]}),
    ("--tensor-model-parallel-size 4 --num-query-groups 4", lambda r: (0, r == 0, (0,)),
     lambda r: {"tp tp_dp_cp": [0, 1, 2, 3], "dp": [r]}),
    ("--tensor-model-parallel-size 2", lambda r: (r // 2, r % 2 == 0, (0, 2)), lambda r: {
        "tp mp tp_cp": [r // 2 * 2, r // 2 * 2 + 1], "dp dp_cp intra_dp_cp": [r % 2, r % 2 + 2],
        "cp pp embd pos_embd ep": [r], "tp_dp_cp intra_dist_opt": [0, 1, 2, 3],
        "expt_tp tp_ep": [r], "expt_dp": [0, 1, 2, 3],  # experts are not split by tensor ranks
    }),
])  # fmt: skip
def test_groups_of_four_ranks(flags, place, members):
    for rank, result in enumerate(run_world(describe, 4, flags, "sft")):
        *here, groups = result["actor"]
        assert tuple(here) == place(rank)
        for names, ranks in members(rank).items():
            assert {name: groups[name] for name in names.split()} == dict.fromkeys(names.split(), ranks)


def test_a_disjoint_role_map():
    flags = "--role-map actor=0-1;critic=2;reward=3;reference=3 --actor-tensor-model-parallel-size 2"
    results = run_world(describe, 4, flags, "rl")
    members = {"actor": [0, 1], "critic": [2], "reward": [3], "reference": [3]}
    for rank, result in enumerate(results):
        for role, ranks in members.items():
            dp_rank, is_leader, leaders, groups = result[role]
            assert leaders == (ranks[0],) and is_leader == (rank == ranks[0])
            if rank not in ranks:
                assert dp_rank is None and groups == {}
                continue
            assert dp_rank == 0
            assert groups["tp"] == groups["tp_dp_cp"] == groups["intra_dist_opt"] == ranks
            assert groups["dp"] == groups["pp"] == groups["cp"] == groups["ep"] == [rank]


def rollout_place(rank, flags):
    here = role_mesh.create_mesh(parse_roles(flags, dist.get_world_size(), program="rl"), SAFETY)
    place, group = here["rollout"], here.channel("weights")
    context = place.pg_collection and dist.get_world_size(place.pg_collection.cp)
    return place.replicas, context, group and dist.get_process_group_ranks(group), here.roles_of(rank)


def test_context_ranks_of_the_actor_are_replicas_of_the_rollout():
    flags = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    everything = ["actor", "critic", "reward", "reference"]  # the rollout counts as the actor
    assert run_world(rollout_place, 4, flags) == [(((0, 1), (2, 3)), 1, [0, 1, 2, 3], everything)] * 4


def test_a_separate_rollout_has_a_group_with_the_actor():
    flags = "--role-map actor=0-1;critic=3;reward=3;reference=3;rollout=1-2 --rollout-tensor-model-parallel-size 2"
    results = run_world(rollout_place, 4, flags)
    assert [replicas for replicas, *_ in results] == [((1, 2),)] * 4
    assert [context for _, context, *_ in results] == [None, 1, 1, None]
    assert [group for _, _, group, _ in results[:3]] == [[0, 1, 2]] * 3
    assert [roles for *_, roles in results] == [
        ["actor"], ["actor", "rollout"], ["rollout"], ["critic", "reward", "reference"],
    ]  # fmt: skip


@on_each_rank(2)
def test_an_absent_role_is_on_no_rank(rank):
    here = role_mesh.create_mesh(parse_roles("--advantage grpo --kl-coefficient 0", 2, program="rl"), SAFETY)
    for name in ("critic", "reference"):
        place = here[name]
        assert name not in here.roles and place.role == place.model_role == name and place.rank == rank
        assert (place.replicas, place.leaders, place.ranks) == ((), (), range(0))
        assert place.pg_collection is None and place.replica_group is None
        assert not place.is_member and not place.is_leader and place.dp_rank is None
    with pytest.raises(KeyError, match="judge"):
        here["judge"]
    assert here.roles_of(rank) == ["actor", "reward"]
    assert dist.get_process_group_ranks(here.leaders_group("actor", "reward")) == [0, 1]


@on_each_rank(2)
def test_colocated_roles_share_their_groups(rank):
    here = role_mesh.create_mesh(parse_roles("--reward-tensor-model-parallel-size 2", 2, program="rl"), SAFETY)
    actor, critic, reward, rollout = (here[name].pg_collection for name in ("actor", "critic", "reward", "rollout"))
    assert all(getattr(actor, name) is getattr(each, name) for name in NAMES for each in (rollout, critic))
    assert here["rollout"].model_role == "actor"
    assert actor.dp is reward.tp  # both are ranks 0 and 1
    assert actor.tp is not reward.tp
    distinct = {id(getattr(c, name)) for c in (actor, critic, reward) for name in NAMES if getattr(c, name) is not None}
    assert len(distinct) == 2  # a group of one's own rank, and of both


def channel_groups(rank: int) -> tuple[dict, int]:
    """(ranks of the channels and of the group of batches that this rank belongs to, how many groups these are)."""
    flags = "--role-map actor=0;critic=0;reward=1;reference=1;teacher=1;rollout=1 --reward format --distill loss"
    here = role_mesh.create_mesh(parse_roles(flags, 2, program="rl"), SAFETY)
    groups = {name: here.channel(name) for name in role_mesh.CHANNELS}
    groups["batches"] = here.leaders_group("rollout", "actor")
    own = {name: group for name, group in groups.items() if group != dist.GroupMember.NON_GROUP_MEMBER}
    return {name: dist.get_process_group_ranks(group) for name, group in own.items()}, len({*map(id, own.values())})


def test_each_channel_has_a_group_of_its_own():
    """Two channels between the same ranks that shared a group would order each other's collectives."""
    both = {"weights": [0, 1], "reference": [0, 1], "routes/actor": [0, 1], "teacher": [0, 1], "batches": [0, 1]}
    assert run_world(channel_groups, 2) == [
        (both, 5),
        (both | {"scores": [1], "routes/reference": [1], "evaluation": [1]}, 6),
    ]


def test_sums_and_gathers():
    def talk(rank):
        here = role_mesh.create_mesh(parse_roles("--tensor-model-parallel-size 2", 4, program="rl"), SAFETY)
        place = here["actor"]
        total = place.dp_all_reduce(torch.tensor([place.dp_rank + 1.0, float(dist.get_rank(place.pg_collection.tp))]))
        pair = here.leaders_group("actor", "critic")
        assert pair is here.leaders_group("critic", "actor")
        ranks = dist.get_process_group_ranks(pair) if rank in (0, 2) else None
        return total.tolist(), ranks, here.gather(rank * rank)

    results = run_world(talk, 4)
    assert [r[0] for r in results] == [[3.0, 0.0], [3.0, 2.0]] * 2
    assert [r[1] for r in results] == [[0, 2], None, [0, 2], None]
    assert [r[2] for r in results] == [[0, 1, 4, 9], None, None, None]


@pytest.mark.parametrize("with_nan", [(), (0,), (1,), (2,), (0, 2)])
@on_each_rank(3)
def test_a_maximum_over_replicas_shows_nan_of_each(rank, with_nan):
    """gloo's own loses it, unless it is the first rank's."""
    place = role_mesh.create_mesh(parse_roles("", 3, program="rl"), SAFETY)["actor"]
    values = torch.tensor([float(rank), -float("inf"), float("nan") if rank in with_nan else -1.0], dtype=torch.float64)
    *found, last = place.dp_max(values).tolist()
    assert found == [2.0, -float("inf")] and (math.isnan(last) if with_nan else last == -1.0)
    assert place.dp_max(torch.tensor([rank, 2**60 + rank])).tolist() == [2, 2**60 + 2]


def test_initializing_twice_is_initializing_once_and_without_a_launcher_the_world_has_one_rank():
    def again(rank):
        group = dist.group.WORLD
        role_mesh.join_process_group(SAFETY)
        is_same = dist.group.WORLD is group
        dist.destroy_process_group()
        del os.environ["RANK"]
        role_mesh.join_process_group(SAFETY)
        return is_same, dist.get_world_size(), dist.get_backend()

    assert run_world(again, 1) == [(True, 1, "gloo")]


def test_ranks_that_are_started_again_do_not_read_what_their_predecessors_left_in_the_store():
    def started_again(rank):
        dist.destroy_process_group()
        agent, found = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent.port), TORCHELASTIC_USE_AGENT_STORE="True")
        for attempt in range(2):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            role_mesh.join_process_group(SAFETY)
            store = dist.distributed_c10d._get_default_store()
            found.append(store.check(["left"]))
            store.set("left", "")
            dist.destroy_process_group()
        return found

    assert run_world(started_again, 1) == [[False, False]]


def test_a_launchers_variables_define_the_world():
    def launched(rank, port):
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        role_mesh.join_process_group(SAFETY)
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total.item()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_world(launched, 2, port) == [(0, 2, 3), (1, 2, 3)]


def test_a_role_has_more_groups_in_the_world_than_a_rank_uses(monkeypatch):
    """Why the process group is bound to no device: each group would be split from the world's, by all ranks."""
    created = []
    with fake_world(64):
        new_group = dist.new_group
        monkeypatch.setattr(dist, "new_group", lambda ranks, **_: created.append(ranks) or new_group(ranks))
        create_groups(range(64), ParallelSizes(tensor=8), GroupCache())
        assert dist.distributed_c10d._get_default_group().bound_device_id is None
    assert len(created) == 81 and sum(0 in ranks and len(ranks) > 1 for ranks in created) == 3


def store_waits(rank, *limits):
    """(seconds that the store waits, what a rank reads that waits for another one)."""
    dist.destroy_process_group()
    os.environ.pop("RANK", None)  # of this fork alone: a world of one
    role_mesh.join_process_group(*limits)
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "value")
    return store.timeout.total_seconds(), store.get("key")


def test_a_group_may_wait_for_its_first_ranks_as_long_as_a_collective_waits():
    """NCCL's communicators are created at the first collective: the store must not give up before."""
    unlimited = role_mesh.NO_LIMIT.total_seconds()
    assert run_world(store_waits, 1, SAFETY, role_mesh.NO_LIMIT) == [(unlimited, b"value")]
    assert run_world(store_waits, 1, SAFETY) == [(SAFETY.total_seconds(), b"value")]
