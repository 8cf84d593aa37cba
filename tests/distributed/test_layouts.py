"""One PPO update of actor and critic in every parallel layout: the losses, norms and weights of a single rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.tensor import distribute_tensor

from tests.helpers.tiny_models import VOCAB, join_actor, parse_roles, ragged_tokens
from tests.helpers.worlds import run_world

LENGTHS = [1, 2, 3, 5, 17, 11, 1, 4, 9, 16, 8]
DENSE = "--num-layers 4 --adam-eps 1 --lr 0.05 --weight-decay 0.1 --clip-grad 1"  # no division by tiny second moments
MOE = f"{DENSE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq ([0]+[1]*3)"
TP2, SP, PP2 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
CP2, EP2 = "--context-parallel-size 2", "--expert-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VP2 = "--num-layers-per-virtual-pipeline-stage 1"
LAYOUTS = {
    "tp2": (2, DENSE, TP2),
    "tp2-sp": (2, DENSE, f"{TP2} {SP}"),
    "pp2": (2, DENSE, PP2),
    "pp2-vp2": (2, DENSE, f"{PP2} {VP2}"),
    "one": (1, DENSE, ""),
    "dp2": (2, DENSE, ""),
    "dp4": (4, DENSE, ""),
    "cp2": (2, DENSE, CP2),
    "tp2-pp2": (4, DENSE, f"{TP2} {PP2}"),
    "tp2-cp2": (4, DENSE, f"{TP2} {CP2}"),
    "tp2-sp-cp2": (4, DENSE, f"{TP2} {SP} {CP2}"),
    "pp2-cp2": (4, DENSE, f"{PP2} {CP2}"),
    "dp2-distributed-optimizer": (2, DENSE, "--use-distributed-optimizer"),
    "dp2-overlap": (2, DENSE, "--use-distributed-optimizer --overlap-grad-reduce"),
    "pp2-vp2-overlap": (4, DENSE, f"{PP2} {VP2} --use-distributed-optimizer --overlap-grad-reduce"),
    "tp2-sp-recompute": (2, DENSE, f"{TP2} {SP} {RECOMPUTE}"),
    "pp2-cp2-recompute": (4, DENSE, f"{PP2} {CP2} --recompute-activations"),
    "sharded-dp2": (2, DENSE, "--use-torch-fsdp2"),
    "tp2-sp-sharded-dp2": (4, DENSE, f"{TP2} {SP} --use-torch-fsdp2"),
    "tp2-ep2-sp": (4, MOE, f"{TP2} {SP} {EP2}"),
}


def batch_of(role_groups):
    """This lane's sequences (every lanes-th) with all that one PPO update of actor and critic needs."""
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


def parts_of(batch, count: int, multiple: int):
    """The lane's sequences in `count` micro-batches, empty ones where they run out."""
    from megarl.comm import microbatches as mb

    count = -(-count // multiple) * multiple
    places = [torch.arange(len(batch))[i::count] for i in range(count)]
    spare = mb.blank_sequences(batch.present(), batch.lengths.device)
    parts = mb.build_microbatches(batch, [p for p in places if len(p)])
    return parts + [(spare, places[-1])] * (count - len(parts))


def whole_weights(stages, pg_collection) -> dict:
    """Every tensor of the model by its name in a checkpoint, put together from all ranks' shards; equal everywhere."""
    from megarl.mcore.parallel.fsdp import local_rows

    shards = []

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
            shards.append((item.key, item.global_shape, offset, item.prepend_axis_num, item.data.detach().clone()))

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": pg_collection.dp_cp}
    for chunk in stages:
        visit(local_rows(chunk.sharded_state_dict(metadata=metadata)))
    everyone = [None] * dist.get_world_size(pg_collection.intra_dist_opt)
    dist.all_gather_object(everyone, shards, group=pg_collection.intra_dist_opt)
    found = {}
    for key, shape, offset, prepended, data in (shard for part in everyone for shard in part):
        whole = found.setdefault(key, torch.full(shape, float("nan")))
        data = data[(None,) * prepended]
        box = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
        whole[box] = data
    assert found and all(not whole.isnan().any() for whole in found.values())
    return found


def forward_of(value_head: bool):
    """The role's forward: (chunk, micro-batch) -> values or scores."""
    from megarl.mcore.model import forward_pass

    if value_head:
        return lambda chunk, part: forward_pass.token_values(chunk, part.tokens, part.lengths, part.routing)
    return lambda chunk, part: forward_pass.token_scores(chunk, part.tokens, part.lengths, 0.8, VOCAB, part.routing)


def clipped_loss(scores, part):
    """The clipped policy loss of each token."""
    from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
    from megarl.algorithms.policy_losses.ppo_clip import ppo_clip

    fields = scores.logprobs, part.logprobs, part.advantages, part.response_mask, part.cu_seqlens
    return ppo_clip(PolicyTokens(*fields), ClipOptions(0.2, 0.3)).loss


def update(rank, flags: str, parts: int, value_head: bool):
    """(loss sums, gradient norm, whole weights) of one update, the same on every rank."""
    from megarl.algorithms.aggregation import token_mean
    from megarl.algorithms.value_loss import clipped_value_loss
    from megarl.roles.trainable_model import TrainableModel

    roles = parse_roles(flags, dist.get_world_size())
    args, place = join_actor(flags)
    trainable_model = TrainableModel(roles["actor"], place, VOCAB, 1, value_head)
    with torch.no_grad():
        for chunk in trainable_model.model:
            if value_head and chunk.post_process:  # a head of zeros would stop gradients
                weight, drawn = chunk.output_layer.weight, torch.linspace(-0.2, 0.3, 64).unsqueeze(0)
                if args.use_torch_fsdp2:
                    drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
                weight.copy_(drawn)
    before = whole_weights(trainable_model.model, place.pg_collection)
    batch = batch_of(place)
    count = place.dp_all_reduce(batch.response_mask.sum().double())

    def loss(out, part):
        if value_head:
            terms = clipped_value_loss(out, part.values, part.returns, 0.2).loss
        else:
            terms = clipped_loss(out, part) - 0.1 * out.entropy
        value = token_mean(terms, part.response_mask, count)
        return value, value.detach().double()

    multiple = dist.get_world_size(place.pg_collection.pp) if len(trainable_model.model) > 1 else 1
    parts = parts_of(batch, parts, multiple)
    trainable_model.routes.attach(batch, parts)
    scores = [out for out, places in trainable_model.forward_only(parts, forward_of(value_head)) if len(places)]
    trainable_model.routes.attach(batch, parts)
    losses, applied, norm = trainable_model.update(parts, forward_of(value_head), loss)
    assert applied
    total = place.dp_all_reduce(torch.stack(losses).sum())
    flat = scores if value_head else [s.logprobs for s in scores]
    checked = place.dp_all_reduce(sum(s.double().square().sum() for s in flat))
    return float(total), norm, float(checked), before, whole_weights(trainable_model.model, place.pg_collection)


def updates(rank, flags: str, splits: tuple[int, ...]) -> dict:
    """Results of `update` for actor and critic and each number of micro-batches."""
    return {(parts, head): update(rank, flags, parts, head) for parts in splits for head in (False, True)}


@functools.cache
def single(flags: str) -> dict:
    return run_world(updates, 1, flags, (1,))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_does_not_depend_on_the_layout(layout):
    size, shape, flags = LAYOUTS[layout]
    for found in run_world(updates, size, f"{shape} {flags}", (1, 2, 5)):
        for (_, head), (loss, norm, checked, before, after) in found.items():
            one_loss, one_norm, one_checked, one_before, one_after = single(shape)[1, head]
            assert before.keys() == one_before.keys()
            assert all(torch.equal(before[key], weight) for key, weight in one_before.items())
            assert checked == pytest.approx(one_checked, rel=1e-5)
            assert loss == pytest.approx(one_loss, rel=1e-5, abs=2e-6)  # a mean of terms of about 1
            assert norm == pytest.approx(one_norm, rel=1e-5)
            assert max(float((after[key] - weight).abs().max()) for key, weight in one_after.items()) <= 1e-6
