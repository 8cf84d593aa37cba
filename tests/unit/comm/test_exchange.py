"""Batches between roles: exact bytes, each field to its replica and back, no padding."""

import random

import pytest
import torch
import torch.distributed as dist

from megarl.batch import FIELDS, concatenate, empty_batch
from megarl.comm import exchange
from megarl.comm.exchange import HEADER, from_bytes, to_bytes
from tests.helpers.models.batches import create_mesh, random_batch, sequences, share_of
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

SAMPLES = 2  # per prompt: sequences 2p and 2p + 1 belong together
OTHERS = [name for name in FIELDS if name not in HEADER]


@pytest.mark.parametrize("seed", range(40))
def test_bytes_round_trip_for_any_fields(seed):
    names = HEADER + random.Random(seed).sample(OTHERS, seed % (len(OTHERS) + 1))
    batch = random_batch(seed, names)
    buffer = to_bytes(batch, names)
    assert buffer.dtype == torch.uint8 and buffer.is_contiguous() and len(buffer) % 8 == 0
    back = from_bytes(buffer, names)
    assert back.present() == batch.present()
    assert sequences(back) == sequences(batch)
    for name in names:
        assert getattr(back, name).dtype == FIELDS[name]["dtype"]


@pytest.mark.parametrize("seed", range(10))
def test_fields_are_aligned_at_any_offset_in_the_payload(seed):
    names = HEADER + random.Random(seed).sample(OTHERS, len(OTHERS))
    parts = [to_bytes(random_batch(seed + i, names), names) for i in range(3)]
    payload = torch.cat(parts)
    for i, part in enumerate(payload.split([len(p) for p in parts])):
        back = from_bytes(part, names)
        assert sequences(back) == sequences(random_batch(seed + i, names))
        for name in names:
            assert getattr(back, name).data_ptr() % FIELDS[name]["dtype"].itemsize == 0


def test_bytes_of_the_empty_batch():
    names = HEADER + OTHERS
    buffer = to_bytes(empty_batch(names, torch.device("cpu")), names)
    assert len(buffer) == 24  # the number of sequences, and the lengths of two kinds of rows
    assert len(from_bytes(buffer, names)) == 0 and from_bytes(buffer, names).present() == list(FIELDS)


def test_special_numbers_survive_bit_for_bit():
    batch = random_batch(0, HEADER + ["values", "tokens"], count=2)
    numbers = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, -float("inf")])
    batch.values = numbers.repeat(10)[: len(batch.values)]
    batch.tokens = torch.tensor([2**63 - 1, -(2**63), -1]).repeat(10)[: len(batch.tokens)]
    back = from_bytes(to_bytes(batch, ["sequence_ids", "lengths", "values", "tokens"]), HEADER + ["values", "tokens"])
    assert torch.equal(back.values.view(torch.int32), batch.values.view(torch.int32))
    assert torch.equal(back.tokens, batch.tokens)


ALL = {
    "colocated": ("", 2),
    "one rank": ("", 1),
    "two replicas to one of two ranks": ("--role-map actor=0-1;critic=2-3;reward=2;reference=3"
                                      " --critic-tensor-model-parallel-size 2", 4),
    "one of two ranks to one": ("--role-map actor=0-1;critic=2;reward=3;reference=3"
                                " --actor-tensor-model-parallel-size 2", 4),
    "four replicas to one": ("--role-map actor=0-3;critic=3;reward=0;reference=0", 4),
    "one replica to four": ("--role-map actor=0;critic=0-3;reward=0;reference=0", 4),
    "same ranks, other replicas": ("--critic-tensor-model-parallel-size 2", 4),
    "overlapping": ("--role-map actor=0-2;critic=1-3;reward=0;reference=0", 4),
    "replicas of two to replicas of two": ("--role-map actor=0-3;critic=0-1;reward=0;reference=0"
                                     " --actor-tensor-model-parallel-size 2 --critic-tensor-model-parallel-size 2", 4),
}  # fmt: skip


def owners_of(mesh, count, seed=None):
    """Replicas of the sequences: round robin for the actor; for the critic the same or (with a seed) random."""
    ids = torch.arange(count)
    dp_assignment = {role: ids // SAMPLES % len(mesh[role].replicas) for role in ("actor", "critic")}
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        dp_assignment["critic"] = torch.randint(0, len(mesh["critic"].replicas), (count,), generator=generator)
    return dp_assignment


def there_and_back(rank, flags, seed, count, at_random):
    """Sends a random batch from the actor to the critic, and a field that the critic computed back."""
    mesh = create_mesh(flags)
    dp_assignment = owners_of(mesh, count, seed if at_random else None)
    names = random.Random(seed).sample([n for n in OTHERS if n not in ("tokens", "values")], 4) + ["tokens"]
    whole = random_batch(seed, names, ids=torch.arange(count))
    mine = share_of(whole, mesh["actor"], dp_assignment)
    there = exchange.send(mesh, mine, "actor", "critic", names, dp_assignment)
    expected = share_of(whole, mesh["critic"], dp_assignment)
    assert (there is None) == (expected is None)
    if there is not None:
        assert sequences(there) == sequences(expected)
        assert there.present() == expected.present()
        there.values = there.tokens * 0.5 + 1
    back = exchange.send(mesh, there, "critic", "actor", ["values"], dp_assignment)
    assert (back is None) == (mine is None)
    if back is not None:
        mine.update(back, ["values"])
        assert torch.equal(mine.values, mine.tokens * 0.5 + 1)
    return None if mine is None or not mesh["actor"].is_leader else mine


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("seed, count", [long((1, 14)), (2, 2)])  # two sequences of one prompt: some replicas have none
@pytest.mark.parametrize("at_random", [long(False), True])
def test_fields_go_to_their_owners_and_come_back(layout, seed, count, at_random):
    flags, size = ALL[layout]
    results = run_world(there_and_back, size, flags, seed, count, at_random)
    parts = [part for part in results if part is not None]
    assert concatenate(parts).sequence_ids.tolist() == list(range(count))


def send_nothing(rank, flags):
    mesh = create_mesh(flags)
    names = ["tokens", "scores"]
    mine = empty_batch(HEADER + names, torch.device("cpu")) if mesh["actor"].is_member else None
    there = exchange.send(mesh, mine, "actor", "critic", names, owners_of(mesh, 0))
    return None if there is None else (len(there), there.present())


def test_a_batch_of_no_sequences_arrives_as_one():
    flags, size = ALL["two replicas to one of two ranks"]
    expected = (0, ["sequence_ids", "scores", "lengths", "tokens"])
    assert run_world(send_nothing, size, flags) == [None, None, expected, expected]


def test_roles_that_hold_the_same_sequences_share_the_tensors():
    def same(rank):
        mesh = create_mesh("")
        whole = random_batch(3, ["tokens", "values"], ids=torch.arange(4))
        dp_assignment = owners_of(mesh, 4)
        mine = share_of(whole, mesh["actor"], dp_assignment)
        got = exchange.send(mesh, mine, "actor", "critic", ["tokens"], dp_assignment)
        assert exchange.is_already_there(mesh, "actor", "critic", dp_assignment)
        assert got.tokens is mine.tokens and got.values is None
        dp_assignment["critic"] = 1 - dp_assignment["critic"]
        assert not exchange.is_already_there(mesh, "actor", "critic", dp_assignment)
        other = exchange.send(mesh, mine, "actor", "critic", ["tokens"], dp_assignment)
        assert not set(other.sequence_ids.tolist()) & set(mine.sequence_ids.tolist())
        return got.present()

    assert run_world(same, 2) == [["sequence_ids", "lengths", "tokens"]] * 2


def count_bytes(rank, flags, count):
    mesh = create_mesh(flags)
    whole = random_batch(11, ["tokens", "finished"], ids=torch.arange(count))
    dp_assignment = owners_of(mesh, count)
    mine = share_of(whole, mesh["actor"], dp_assignment)
    sent, members, original = [], [], dist.all_to_all_single

    def counting(output, source, *args, group=None, **kwargs):
        if source.dtype == torch.uint8:
            sent.append(source.numel())
            members.append(dist.get_process_group_ranks(group))
        return original(output, source, *args, group=group, **kwargs)

    dist.all_to_all_single = counting
    exchange.send(mesh, mine, "actor", "critic", ["tokens", "finished"], dp_assignment)
    return sent, members


def test_no_byte_is_padding():
    """Replicas 0, 1 -> the replica led by rank 2: each sends its fields, 8 bytes of count, at most 7 of alignment."""
    flags, size = ALL["two replicas to one of two ranks"]
    results = run_world(count_bytes, size, flags, 14)
    whole = random_batch(11, ["tokens", "finished"], ids=torch.arange(14))
    owner = whole.sequence_ids // SAMPLES % 2
    for dp_rank, (sent, members) in enumerate(results[:2]):
        part = whole.select((owner == dp_rank).nonzero().flatten())
        payload = len(part) * (8 + 8 + 1) + int(part.lengths.sum()) * 8
        assert len(sent) == 1 and members == [[0, 1, 2]]  # one payload, between replica leaders only
        assert payload + 8 <= sent[0] <= payload + 8 + 7
    assert results[2] == ([0], [[0, 1, 2]])
    assert results[3] == ([], [])


def test_other_ranks_return_at_once():
    def bystander(rank):
        mesh = create_mesh("--role-map actor=0;critic=1;reward=2;reference=2")
        if rank == 2:
            return exchange.send(mesh, None, "actor", "critic", ["tokens"], owners_of(mesh, 4)) is None
        dist.barrier(group=mesh.leaders_group("actor", "critic"))
        return rank

    assert run_world(bystander, 3) == [0, 1, True]
