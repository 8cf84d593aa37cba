"""Process groups of a role: its replicas, sizes, groups of a pipeline, and that each group is created once."""

import itertools

import pytest
import torch.distributed as dist

from megarl.mcore.parallel.process_groups import DENSE, EXPERT, GroupCache, ParallelSizes, create_groups, replica_ranks
from tests.helpers.worlds import SAFETY, run_world

NAMES = [*DENSE, *EXPERT, "embd", "pos_embd"]


@pytest.mark.parametrize("tensor, pipeline, context, data, start",
                         [*itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 3), (0, 5))])  # fmt: skip
def test_replicas_partition_the_ranks_in_megatrons_order(tensor, pipeline, context, data, start):
    sizes = ParallelSizes(tensor=tensor, pipeline=pipeline, context=context)
    ranks = range(start, start + tensor * pipeline * context * data)
    replicas = replica_ranks(ranks, sizes)
    assert sizes.data(len(ranks)) == len(replicas) == data
    assert all(len(dp_rank) == sizes.replica_size() == tensor * pipeline * context for dp_rank in replicas)
    assert sorted(itertools.chain(*replicas)) == list(ranks)
    for dp_rank, members in enumerate(replicas):
        for rank in members:  # Megatron's order: tensor fastest, then context, data, pipeline
            assert (rank - start) // (tensor * context) % data == dp_rank
        assert members == sorted(members)  # so the first is tensor rank 0 of the first stage


def test_sizes_of_expert_data_parallelism():
    assert ParallelSizes(tensor=2, expert=2).expert_data(8) == 4
    assert ParallelSizes(pipeline=2, expert=2, expert_tensor=2).expert_data(16) == 2


def pipeline_groups(rank):
    pg_collection = create_groups(range(4), ParallelSizes(pipeline=4), GroupCache(SAFETY))
    return {g: getattr(pg_collection, g) and dist.get_process_group_ranks(getattr(pg_collection, g)) for g in NAMES}


def test_embedding_groups_of_a_pipeline():
    results = run_world(pipeline_groups, 4)
    assert [r["pp"] for r in results] == [[0, 1, 2, 3]] * 4
    assert [r["embd"] for r in results] == [[0, 3], None, None, [0, 3]]  # where the embedding's weights are
    assert [r["pos_embd"] for r in results] == [[0], None, None, None]  # the first stage alone


def test_a_cache_creates_a_group_once():
    def count(rank):
        calls, original = [], dist.new_group
        dist.new_group = lambda ranks, **kwargs: calls.append(ranks) or original(ranks, **kwargs)
        cache = GroupCache(SAFETY)
        assert cache.get([0, 1]) is cache.get((0, 1))
        mine = cache.mine([[0], [1]])
        assert dist.get_process_group_ranks(mine) == [rank]
        assert cache.mine([[0]]) is (mine if rank == 0 else None)
        return calls

    assert run_world(count, 2) == [[[0, 1], [0], [1]]] * 2
