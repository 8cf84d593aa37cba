"""FSDP: one update, memory, scoring, weight transfers and checkpoints equal those without sharding."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.mcore.model import forward_pass, gpt
from megarl.mcore.model.forward_pass import token_scores
from megarl.mcore.parallel import fsdp, pipeline
from megarl.mcore.training import optimizer
from megarl.roles.trainable_model import TrainableModel
from tests.helpers.models.tiny_models import VOCAB, farthest, join_actor, parse_roles, ragged_tokens, whole_tensor
from tests.helpers.tiers import by_default, long
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import on_each_rank, run_world

LENGTHS = [7, 2, 11, 1, 4, 9, 3]
COUNT = sum(LENGTHS)
SGD_LIKE = "--adam-eps 1 --lr 0.05 --weight-decay 0.1 --clip-grad 1"  # no division by tiny second moments
SHARDED, TP2 = "--use-torch-fsdp2", "--tensor-model-parallel-size 2"
BAD = float("nan")


def trainable_model(flags: str, value_head: bool = False):
    """A role's trainable model on this rank; a value head gets random weights, since 0 would stop gradients."""
    _, place = join_actor(flags)
    found = TrainableModel(parse_roles(flags, dist.get_world_size())["actor"], place, VOCAB, 1, value_head)
    if value_head:
        weight = found.model[0].output_layer.weight
        drawn = torch.linspace(-0.2, 0.3, weight.numel()).reshape(weight.shape)
        is_sharded = isinstance(weight, DTensor)
        with torch.no_grad():
            weight.copy_(distribute_tensor(drawn, weight.device_mesh, weight.placements) if is_sharded else drawn)
    return found


def microbatches(role_groups, count: int) -> list:
    """This replica's sequences (round robin) in `count` micro-batches of (tokens, lengths, weights); some are empty."""
    tokens, lengths = ragged_tokens(LENGTHS)
    rows = list(zip(tokens.split(LENGTHS), torch.linspace(-1, 2, COUNT).split(LENGTHS), strict=True))
    groups = [rows[role_groups.dp_rank :: len(role_groups.replicas)][i::count] for i in range(count)]
    nothing = [(torch.zeros(1, dtype=torch.int64), torch.zeros(1))]
    return [
        (torch.cat([t for t, _ in group]), torch.tensor([len(t) for t, _ in group]), torch.cat([w for _, w in group]))
        for group in (g or nothing for g in groups)
    ]


def step(found, count: int = 2, value_head: bool = False, spoil: float = 0.0):
    """(loss over all replicas, whether applied, gradient norm) of an update; `spoil` is added to this rank's loss."""

    def forward(chunk, part):
        if value_head:
            return forward_pass.token_values(chunk, *part[:2])
        return forward_pass.token_scores(chunk, *part[:2], 0.9, VOCAB)

    def loss(out, part):
        if value_head:
            terms = (out - part[2]) ** 2 * (part[2] != 0)
        else:
            terms = -part[2] * out.logprobs - 0.1 * out.entropy * (part[2] != 0)
        value = (terms.sum() + spoil * terms.sum()) / COUNT
        return value, value.detach().double()

    for chunk in found.wrapped:
        chunk.zero_grad_buffer()
    found.optimizer.zero_grad()
    parts = microbatches(found.role_groups, count)
    losses = pipeline.run_microbatches(found.wrapped, parts, forward, loss, found.role_groups.pg_collection, True)
    applied, norm = optimizer.update(found.optimizer)
    found.scheduler.step(1)
    return float(found.role_groups.dp_all_reduce(torch.stack(losses).sum())), applied, norm


def whole(found, tensors: dict) -> dict:
    """{name: parameter or moment} as one rank would hold them."""
    parameters, group = dict(found.model[0].named_parameters()), found.role_groups.pg_collection.tp
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: whole_tensor(name, parameters[name.split("/")[0]], t, group, True) for name, t in full.items()}


def weights(found) -> dict:
    return whole(found, {name: p.detach() for name, p in found.model[0].named_parameters()})


LAYOUTS = {
    "2": (2, ""),
    "4": (4, ""),
    "3, which divide nothing": (3, ""),
    "tp2 and sharded 2": (4, TP2),
    "tp2 with sequence parallelism and sharded 2": (4, f"{TP2} --sequence-parallel"),
    "cp2 alone": (2, "--context-parallel-size 2"),
    "untied": (2, "--untie-embeddings-and-output-weights"),
    "full recompute": (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "clipped": (2, "--clip-grad 0.01"),
}
CASES = [(layout, parts, head) for layout in ("2", "4") for parts in (1, 2, 5) for head in (False, True)]
CASES += [(layout, 2, head) for layout in list(LAYOUTS)[2:] for head in (False, True)]


def one_update(rank, flags: str, parts: int, value_head: bool):
    found = trainable_model(f"{SGD_LIKE} {flags}", value_head)
    assert all(isinstance(p, DTensor) == (SHARDED in flags) for p in found.model.parameters())
    before = weights(found)
    loss, applied, norm = step(found, parts, value_head)
    assert applied
    return loss, norm, before, weights(found)


@functools.cache
def reference(flags: str, value_head: bool):
    return run_world(one_update, 1, flags, 1, value_head)[0]


CHOSEN = [("2", 2, True), ("clipped", 2, False)]
CHOSEN += [("tp2 with sequence parallelism and sharded 2", 2, True)]


@pytest.mark.parametrize("layout, parts, value_head", by_default(CASES, CHOSEN))
def test_an_update_equals_that_of_one_rank(layout, parts, value_head):
    size, flags = LAYOUTS[layout]
    same = flags if layout in ("untied", "clipped") else ""
    loss, norm, before, after = reference(same, value_head)
    for its_loss, its_norm, drawn, updated in run_world(one_update, size, f"{SHARDED} {flags}", parts, value_head):
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-5)
        assert updated.keys() == after.keys()
        assert all(torch.equal(drawn[name], weight) for name, weight in before.items())
        assert max(farthest(updated[name], weight) for name, weight in after.items()) <= 1e-6
        assert max(farthest(updated[name], weight) for name, weight in before.items()) > 1e-4


def norm_in_half_precision(rank, flags: str):
    return step(trainable_model(f"{SGD_LIKE} --bf16 {flags}", True), 5, True)[2]


def test_bf16_gradients_are_accumulated_in_fp32():
    """Over micro-batches and over ranks, in a model with a scalar head."""
    (norm, _), (found, _) = (run_world(norm_in_half_precision, 2, flags) for flags in ("", SHARDED))
    assert found == pytest.approx(norm, rel=1e-5)


@on_each_rank(2)
def test_all_ranks_skip_a_loss_that_is_not_finite_on_one(rank):
    found = trainable_model(f"{SGD_LIKE} {SHARDED}")
    before = weights(found)
    assert not step(found, spoil=BAD if rank == 1 else 0.0)[1]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(found).items()) and step(found)[1]


def alive() -> int:
    """Bytes of all tensors of this process, each storage counted once."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # a sharded tensor is seen by its local one
    tensors = [item for item in gc.get_objects() if type(item) in kinds]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def held(tensors) -> int:
    """Bytes of the storages of sharded tensors."""
    local = [t.to_local() for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def shares(rank):
    """Bytes of the model; here of parameters, gradients, moments; sharded layers; whether scoring frees all."""
    found = trainable_model(SHARDED)
    (part,), parameters = found.optimizer.chained_optimizers, list(found.model.parameters())
    first, second = found.model[0].decoder.layers
    seen = []

    def see(*_):
        seen.append([isinstance(next(layer.parameters()), DTensor) for layer in (first, second)])

    handle = second.mlp.register_forward_pre_hook(see)
    step(found)
    handle.remove()
    moments = [t for state in part.optimizer.state.values() for t in state.values()]
    bytes_here = held(parameters), held([p.grad for p in parameters]), held(moments)
    before = alive()
    found.forward_only([(part, None) for part in parts_of_batch()], scores)
    whole_bytes = sum(p.numel() * 4 for p in parameters)
    # A collective that has ended may hold its buffers for a moment longer.
    return whole_bytes, bytes_here, seen, wait_until(lambda: alive() - before < whole_bytes // 50)


def parts_of_batch():
    (tokens, lengths), everything = ragged_tokens(LENGTHS), torch.arange(len(LENGTHS))
    batch = Batch(sequence_ids=everything, tokens=tokens, lengths=lengths)
    return [part for part, _ in mb.build_microbatches(batch, [everything])]


def scores(chunk, part):
    return token_scores(chunk, part.tokens, part.lengths, 0.9, VOCAB)


@pytest.mark.parametrize("size", [2, long(4)])
def test_a_rank_holds_its_share_and_a_gathered_layer_is_freed_again(size):
    for model_bytes, bytes_here, seen, is_freed in run_world(shares, size):
        assert bytes_here == (model_bytes // size, model_bytes // size, 2 * model_bytes // size)
        assert seen == [[True, False]] * 2  # within the second layer: the first one's shares, its own whole weights
        assert is_freed


@on_each_rank(2)
def test_a_frozen_model_is_sharded_for_scoring(rank):
    args, place = join_actor()
    stages = gpt.build_model(args, VOCAB, place.pg_collection).requires_grad_(False)
    (batch,) = parts_of_batch()
    with forward_pass.inference_mode(stages):
        plain = scores(stages[0], batch)
        fsdp.shard(stages[0], place.pg_collection)
        assert all(map(torch.equal, plain, scores(stages[0], batch)))
        assert 2 * held(stages.parameters()) == sum(p.numel() * 4 for p in stages.parameters())
