"""FSDP: gradients of 16 bits, memory and scoring; updates are those without sharding (`tests/distributed`)."""

import gc

import pytest
import torch
from torch.distributed.tensor import DTensor

from megarl.mcore.model import forward_pass, gpt
from megarl.mcore.parallel import fsdp
from megarl.mcore.training import optimizer
from tests.helpers.models.gradient_accumulation import accumulate, microbatches_of, wrapped_model
from tests.helpers.models.tiny_models import VOCAB, join_actor
from tests.helpers.tiers import long
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import on_each_rank, run_world

SHARDED = "--use-torch-fsdp2"


def norm_in_half_precision(rank, flags: str) -> float:
    _, wrapped, adam, _, place = wrapped_model(f"--bf16 {flags}", value_head=True)
    accumulate(wrapped, adam, place, 3, True)
    return optimizer.update(adam)[1]


def test_bf16_gradients_are_accumulated_in_fp32():
    """Over micro-batches and over ranks, in a model with a scalar head."""
    (norm, _), (found, _) = (run_world(norm_in_half_precision, 2, flags) for flags in ("", SHARDED))
    assert found == pytest.approx(norm, rel=1e-5)


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


def scores_of(chunk, place):
    """Log-probs and entropies of all sequences, as scoring computes them."""
    ((tokens, lengths, _),) = microbatches_of(place, 1)
    with forward_pass.inference_mode(chunk):
        return forward_pass.token_scores(chunk, tokens, lengths, 0.9, VOCAB)[:2]


def shares(rank):
    """Bytes of the model; here of parameters, gradients, moments; sharded layers; whether scoring frees all."""
    model, wrapped, adam, _, place = wrapped_model(SHARDED)
    (part,), parameters = adam.chained_optimizers, list(model.parameters())
    first, second = model.decoder.layers
    seen = []

    def see(*_):
        seen.append([isinstance(next(layer.parameters()), DTensor) for layer in (first, second)])

    handle = second.mlp.register_forward_pre_hook(see)
    accumulate(wrapped, adam, place, 2)
    assert optimizer.update(adam)[0]
    handle.remove()
    moments = [t for state in part.optimizer.state.values() for t in state.values()]
    bytes_here = held(parameters), held([p.grad for p in parameters]), held(moments)
    before = alive()
    scores_of(model, place)
    whole_bytes = sum(p.numel() * 4 for p in parameters)
    # A collective that has ended may hold its buffers for a moment longer.
    return whole_bytes, bytes_here, seen, wait_until(lambda: alive() - before < whole_bytes // 50)


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
    plain = scores_of(stages[0], place)
    fsdp.shard(stages[0], place.pg_collection)
    assert all(map(torch.equal, plain, scores_of(stages[0], place)))
    assert 2 * held(stages.parameters()) == sum(p.numel() * 4 for p in stages.parameters())
