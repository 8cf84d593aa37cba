"""Random ragged batches, the role mesh that exchanges them, and a replica's share of one."""

import torch
import torch.distributed as dist

from megarl.batch import FIELDS, Batch
from megarl.comm.exchange import STATES
from tests.helpers.models.tiny_models import parse_roles
from tests.helpers.worlds import SAFETY

TOKEN_FIELDS = [name for name, spec in FIELDS.items() if spec["kind"] == "token"]


def random_batch(seed: int, names=tuple(FIELDS), count=None, ids=None) -> Batch:
    """A ragged batch whose fields hold random numbers; sequences of 1 to 9 tokens, ascending ids with gaps."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high, size):
        return torch.randint(0, high, (size,), generator=generator)

    count = int(integers(8, 1)) if count is None else count
    ids = (integers(3, count) + 1).cumsum(0) if ids is None else ids
    lengths = integers(9, len(ids)) + 1
    sizes = {"sequence": len(ids), "token": int(lengths.sum())}
    values = {name: integers(2**16, sizes[FIELDS[name]["kind"]]) for name in names}
    values = {name: (v % 2 == 0 if FIELDS[name]["dtype"] == torch.bool else v) for name, v in values.items()}
    values = {name: v.to(FIELDS[name]["dtype"]) for name, v in values.items()}
    if STATES in values:
        values[STATES] = values[STATES].unsqueeze(1) * torch.arange(1, 4, dtype=torch.uint8)
    return Batch(**values | {"sequence_ids": ids, "lengths": lengths})


def sequences(batch: Batch) -> list[dict]:
    """The batch as plain Python: one dict a sequence."""
    cut = {name: getattr(batch, name).split(batch.lengths.tolist()) for name in batch.present() if name in TOKEN_FIELDS}
    flat = {name: getattr(batch, name) for name in batch.present() if name not in TOKEN_FIELDS}
    return [
        {name: v[i].tolist() for name, v in cut.items()} | {name: v[i].item() for name, v in flat.items()}
        for i in range(len(batch))
    ]


def create_mesh(flags):
    """The role mesh of the running world."""
    from megarl.comm import role_mesh

    return role_mesh.create_mesh(parse_roles(flags, dist.get_world_size(), program="rl"), SAFETY)


def share_of(whole, role_groups, dp_assignment):
    """The sequences of the whole batch that this replica holds; None outside the role."""
    if not role_groups.is_member:
        return None
    return whole.select(
        (dp_assignment[role_groups.role][whole.sequence_ids] == role_groups.dp_rank).nonzero().flatten()
    )
