"""A save in two parts: what a rank writes has the checksum that it says, and is what was there when it was planned."""

from pathlib import Path

import torch

from megarl.checkpoint import manifest
from tests.helpers.worlds import run_world


def planned_and_written(rank: int, folder: Path) -> dict[str, dict]:
    """What the rank says about its files; the tensors change between the snapshot and the writing."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megarl.mcore.weights.planned_save import plan_save

    weights = torch.arange(6.0)
    state = {"w": ShardedTensor.from_rank_offsets("w", weights, (0, rank, 2))}
    planned = plan_save(state, folder)
    planned.snapshot(state)
    weights.fill_(-1)
    results, sealed = planned.write()
    gathered: list = [None] * 2
    torch.distributed.all_gather_object(gathered, results)
    if rank == 0:
        planned.finish(gathered)
    return sealed


def test_files_have_their_checksums_and_the_snapshot(tmp_path):
    found = run_world(planned_and_written, 2, tmp_path)
    assert all(found) and not found[0].keys() & found[1].keys()
    for name, entry in (found[0] | found[1]).items():
        assert manifest.seal(tmp_path / name) == entry
    stored = b"".join((tmp_path / name).read_bytes() for name in found[1])
    assert torch.arange(6.0).numpy().tobytes() in stored
