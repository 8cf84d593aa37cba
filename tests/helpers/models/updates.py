"""Parts of one PPO update of actor and critic: a batch, its micro-batches, the forward, the loss, whole weights."""

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from tests.helpers.models.tiny_models import VOCAB, ragged_tokens

LENGTHS = [1, 2, 3, 5, 17, 11, 1, 4, 9, 16, 8]


def batch_of(role_groups):
    """This replica's sequences (round robin) with all fields of one PPO update of actor and critic."""
    from megarl.batch import Batch

    tokens, lengths = ragged_tokens(LENGTHS)
    total, generator = len(tokens), torch.Generator().manual_seed(3)

    def draw():
        return torch.randn(total, generator=generator)

    batch = Batch(
        sequence_ids=torch.arange(len(lengths)),
        lengths=lengths,
        tokens=tokens,
        response_mask=draw() > -0.5,
        logprobs=-3 + 0.2 * draw(),
        advantages=draw(),
        values=0.3 * draw(),
        returns=draw(),
    )
    firsts = lengths.cumsum(0) - lengths
    batch.response_mask[firsts] = False
    return batch.select(torch.arange(len(lengths))[role_groups.dp_rank :: len(role_groups.replicas)])


def split_microbatches(batch, count: int, multiple: int):
    """The replica's sequences in `count` micro-batches (rounded up to `multiple`), blank ones at the end."""
    from megarl.comm import microbatches as mb

    count = -(-count // multiple) * multiple
    places = [torch.arange(len(batch))[i::count] for i in range(count)]
    spare = mb.blank_sequences(batch.present(), batch.lengths.device)
    parts = mb.build_microbatches(batch, [p for p in places if len(p)])
    return parts + [(spare, places[-1])] * (count - len(parts))


def whole_weights(stages, pg_collection, describe=None) -> dict:
    """Every tensor of the model by its name in a checkpoint, gathered from all ranks' shards.

    `describe`: (chunk, metadata) -> sharded state; default: of all weights.
    """
    from megarl.mcore.parallel.fsdp import local_rows

    shards: list = []
    values: list = []

    def visit(item):
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, list):
            for part in item:
                visit(part)
        elif isinstance(item, ShardedTensorFactory):
            visit(item.build())
        elif isinstance(item, ShardedTensor) and item.replica_id != 1:  # a spare row of a rank without rows
            offset = item.global_offset
            shards.append((item.key, item.global_shape, offset, item.prepend_axis_num, item.data.shape))
            values.append(item.data.detach().flatten().float())

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": pg_collection.dp_cp}
    for chunk in stages:
        state = describe(chunk, metadata) if describe else chunk.sharded_state_dict(metadata=metadata)
        visit(local_rows(state))
    found: dict = {}
    for (key, shape, offset, prepended, own_shape), data in _of_all_ranks(shards, values, pg_collection.intra_dist_opt):
        whole = found.setdefault(key, torch.full(shape, float("nan")))
        data = data.view(own_shape)[(None,) * prepended]
        box = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
        whole[box] = data
    assert found and all(not whole.isnan().any() for whole in found.values())
    return found


def _of_all_ranks(shards: list, values: list, group):
    """Pairs of a shard and its values, of all ranks. Values come as one tensor: of objects each is unpickled alone."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, shards, group=group)
    sizes = [[shape.numel() for *_, shape in part] for part in everyone]
    longest = max(map(sum, sizes))
    flat = torch.nn.functional.pad(torch.cat([torch.empty(0), *values]), (0, longest - sum(map(len, values))))
    rows = [torch.empty_like(flat) for _ in everyone]
    dist.all_gather(rows, flat, group=group)
    for part, row, numbers in zip(everyone, rows, sizes, strict=True):
        yield from zip(part, row[: sum(numbers)].split(numbers), strict=True)


def forward_of(value_head: bool):
    """The role's forward: (chunk, micro-batch) -> values or scores."""
    from megarl.mcore.model import forward_pass

    if value_head:
        return lambda chunk, part: forward_pass.token_values(chunk, part.tokens, part.lengths, part.routing)
    return lambda chunk, part: forward_pass.token_scores(chunk, part.tokens, part.lengths, 0.8, VOCAB, part.routing)


def clipped_loss(scores, part):
    """The clipped policy loss of each token."""
    from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
    from megarl.algorithms.policy_losses.single_tokens import ppo_clip

    fields = scores.logprobs, part.logprobs, part.advantages, part.response_mask, part.cu_seqlens
    return ppo_clip(PolicyTokens(*fields), ClipOptions(0.2, 0.3)).loss
