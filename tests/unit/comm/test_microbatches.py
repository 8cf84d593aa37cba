"""Mini-batches and micro-batches: a token cap that holds, few and even micro-batches, equally many on every replica."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.groups import PromptGroups
from tests.helpers.worlds import run_world

HIDDEN = 64


def ragged(seed: int, count: int, longest: int = 13) -> torch.Tensor:
    """Lengths from 1 up."""
    return torch.randint(1, longest, (count,), generator=torch.Generator().manual_seed(seed))


def spread(groups, lengths) -> float:
    """Largest work of a group over the mean."""
    work = torch.stack([mb.sequence_flops(lengths[group], HIDDEN).sum() for group in groups]).double()
    return float(work.max() / work.mean())


def test_eight_sequences_of_seven_tokens_under_a_cap_of_eight_are_eight_microbatches():
    assert sorted(group.tolist() for group in mb.bin_pack(torch.full((8,), 7), 8, HIDDEN)) == [[i] for i in range(8)]


@pytest.mark.parametrize("count", [1, 4, 30])
@pytest.mark.parametrize("seed", range(20))
def test_the_cap_holds_and_every_sequence_is_packed_once(seed, count):
    lengths = ragged(seed, 2 * seed)
    groups = mb.bin_pack(lengths, 12, HIDDEN, count)
    assert sorted(i for group in groups for i in group.tolist()) == list(range(2 * seed))
    assert all(len(group) and lengths[group].sum() <= 12 for group in groups)
    assert all(group.tolist() == sorted(group.tolist()) for group in groups)
    work = [int(mb.sequence_flops(lengths[group], HIDDEN).sum()) for group in groups]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_few_microbatches(seed):
    """Best fit decreasing: at most 11/9 of the fewest, which the sum of tokens bounds from below, and one more."""
    lengths = ragged(seed, 60, 40)
    fewest = -(-int(lengths.sum()) // 64)
    assert fewest <= len(mb.bin_pack(lengths, 64, HIDDEN)) <= 11 * fewest // 9 + 1


def test_bin_packing_finds_what_the_original_order_misses():
    assert len(mb.bin_pack(torch.tensor([5, 4, 3, 4]), 8, HIDDEN)) == 2  # in order: 5 | 4 3 | 4


@pytest.mark.parametrize("seed", range(5))
def test_work_is_even_where_there_is_room(seed):
    lengths = ragged(seed, 60, 40)
    assert spread(mb.bin_pack(lengths, 400, HIDDEN), lengths) < 1.05


@pytest.mark.parametrize("count, expected", [(1, 2), (2, 2), (3, 3), (6, 6), (9, 6)])
def test_more_microbatches_than_needed_if_other_replicas_need_them(count, expected):
    assert len(mb.bin_pack(torch.tensor([1, 2, 3, 4, 5, 1]), 8, HIDDEN, count)) == expected


def test_even_bin_packing_falls_back_to_tight_bin_packing():
    lengths = torch.tensor([6, 6, 4, 4, 4])  # by work alone 6 4 | 6 4, and no room for the last
    groups = mb.bin_pack(lengths, 12, HIDDEN)
    assert [lengths[group].tolist() for group in groups] == [[6, 6], [4, 4, 4]]


def test_no_sequences_make_no_microbatch_and_a_full_cap_makes_one():
    assert mb.bin_pack(torch.zeros(0, dtype=torch.int64), 8, HIDDEN) == []
    assert [group.tolist() for group in mb.bin_pack(torch.tensor([3, 5, 8]), 8, HIDDEN)] == [[2], [0, 1]]


def test_work_is_quadratic_and_counted_in_64_bits():
    for dtype in (torch.int32, torch.int64):
        lengths = torch.tensor([1, 35_000, 50_000, 1_000_000], dtype=dtype)
        work = mb.sequence_flops(lengths, 8192)
        assert work.dtype == torch.int64
        assert work.tolist() == [s * s + 12 * 8192 * s for s in (1, 35_000, 50_000, 1_000_000)]
    # There attention costs what the layers do.
    assert mb.sequence_flops(torch.tensor([12 * 64]), 64) == 2 * (12 * 64) ** 2


@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("seed", range(10))
def test_the_two_of_a_pair_share_a_microbatch(seed, count):
    lengths = ragged(seed, 4 * seed)
    groups = mb.bin_pack(lengths, 24, HIDDEN, count, sequences_per_example=2)
    assert torch.equal(torch.cat([torch.zeros(0).long(), *groups]).sort().values, torch.arange(4 * seed))
    for group in groups:
        first, second = group.view(-1, 2).unbind(1)
        assert (first % 2 == 0).all() and torch.equal(second, first + 1) and (first.diff() > 0).all()
        assert lengths[group].sum() <= 24
    # Sequences of the pairs' lengths pack alike: a pair is one thing to pack.
    assert len(groups) == len(mb.bin_pack(lengths.view(-1, 2).sum(1), 24, HIDDEN, count))


@pytest.mark.parametrize("count, size", [(12, 4), (12, 5), (12, 1), (7, 3), (12, None), (12, 12), (12, 13)])
def test_minibatches_partition_the_sequences(count, size):
    parts, size = mb.minibatch_ids(count, size, 3, 1, 0), min(size or count, count)
    assert [len(part) for part in parts] == [size] * (count // size) + [count % size] * (count % size > 0)
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@pytest.mark.parametrize("prompts, samples, size, group", [
    (6, 4, 8, 4), (5, 4, 8, 4), (6, 4, 12, 4), (6, 4, 6, 1), (6, 4, 24, 1), (6, 1, 3, 1), (6, 4, None, 1),
])  # fmt: skip
def test_minibatches_have_whole_groups_where_their_size_allows(prompts, samples, size, group):
    settings, count = Settings(minibatch_size=size, samples_per_prompt=samples, seed=3), prompts * samples
    parts = mb.minibatches_of_step(settings, PromptGroups.equal(prompts, samples), step=1, epoch=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    is_whole = all(
        part.tolist() == (part[::samples, None] + torch.arange(samples)).flatten().tolist() for part in parts
    )
    assert is_whole == (group > 1 or samples == 1 or len(parts) == 1)
    assert group == 1 or any(part.tolist() != list(range(len(part))) for part in parts)  # groups are drawn


def test_minibatches_depend_on_seed_step_and_epoch_alone():
    def drawn(*where):
        return [part.tolist() for part in mb.minibatch_ids(24, 6, *where)]

    torch.manual_seed(0)
    first = drawn(3, 1, 0)
    torch.rand(5)
    assert drawn(3, 1, 0) == first
    assert len({str(drawn(*where)) for where in [(3, 1, 0), (4, 1, 0), (3, 2, 0), (3, 1, 1)]}) == 4


def small_batch(count=5) -> Batch:
    lengths = torch.arange(2, count + 2)
    total = int(lengths.sum())
    return Batch(sequence_ids=torch.arange(count) * 3, lengths=lengths, tokens=torch.arange(total) % 16)


def test_members_are_found_by_id_not_by_position():
    assert mb.positions_of(small_batch(), torch.tensor([6, 4, 0, 12, 13])).tolist() == [0, 2, 4]


def test_write_back_puts_values_at_their_sequences():
    batch = small_batch()
    offsets = [slice(int(a), int(b)) for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    whole = torch.rand(len(batch.tokens)) + 1
    pieces = [(torch.cat([whole[offsets[i]] for i in places]), torch.tensor(places)) for places in ([3, 0], [4, 1])]
    mb.write_back(batch, "values", [*pieces, (torch.ones(1), torch.zeros(0, dtype=torch.int64))])
    for i, rows in enumerate(offsets):
        assert torch.equal(batch.values[rows], whole[rows] if i != 2 else torch.zeros(4))
    assert batch.values.dtype == torch.float32


def counts(rank: int, lengths: list[list[int]], multiple: int, sequences_per_example: int = 1):
    mine = torch.tensor(lengths[rank], dtype=torch.int64)
    ids = torch.arange(len(mine))
    batch = Batch(sequence_ids=ids, lengths=mine, tokens=torch.zeros(int(mine.sum()), dtype=torch.int64),
                  response_mask=torch.ones(int(mine.sum()), dtype=torch.bool))  # fmt: skip
    args = SimpleNamespace(hidden_size=HIDDEN)
    role = SimpleNamespace(max_tokens_per_microbatch=8, megatron=args, microbatch_multiple=multiple)
    role_groups = SimpleNamespace(pg_collection=SimpleNamespace(dp=dist.group.WORLD))
    parts = mb.role_microbatches(batch, ids, role, role_groups, sequences_per_example)
    for part, places in parts:
        assert not len(places) or torch.equal(part.lengths, mine[places])
    return [(len(part.tokens), bool(part.response_mask.any()), places.tolist()) for part, places in parts]


def test_replicas_run_equally_many_microbatches_and_blank_ones_count_nowhere():
    one, other, third = run_world(counts, 3, [[7, 7, 7], [4, 4], []], 1)
    assert one == [(7, True, [0]), (7, True, [1]), (7, True, [2])]
    assert other == [(4, True, [0]), (4, True, [1]), (1, False, [])]
    assert third == [(1, False, [])] * 3


def test_a_replica_without_pairs_runs_blank_microbatches():
    one, other = run_world(counts, 2, [[3, 4, 1, 2, 5, 3], []], 1, 2)
    assert sorted(places for _, _, places in one) == [[0, 1], [2, 3], [4, 5]]
    assert other == [(2, False, [])] * len(one)


@pytest.mark.parametrize("multiple, expected", [(2, 4), (3, 3), (4, 4), (8, 8)])
def test_virtual_stages_need_a_multiple(multiple, expected):
    results = run_world(counts, 2, [[7, 7, 7], []], multiple)
    assert [len(parts) for parts in results] == [expected] * 2


@pytest.mark.parametrize("size", [None, 2, 4, 10, 12])
def test_the_updates_of_a_step_are_its_minibatches(size):
    """The learning rate's schedule counts them before the first step; the last mini-batch may be smaller."""
    settings = Settings(prompts_per_step=5, samples_per_prompt=2, minibatch_size=size, ppo_epochs=3)
    minibatches = [
        ids for epoch in range(3) for ids in mb.minibatches_of_step(settings, PromptGroups.equal(5, 2), 1, epoch)
    ]
    assert settings.updates_per_step == len(minibatches)
