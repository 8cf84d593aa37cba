"""Layers of Transformer Engine's spec are put together as local ones: equal results with products in plain torch."""

import os

import pytest
import torch

if "MEGARL_TE" not in os.environ:  # only in a process of their own: Megatron would use it in other tests, too
    pytest.skip("run by tools/te_check.sh", allow_module_level=True)
import transformer_engine.pytorch  # noqa: F401  before megarl hides it without a device

from tests.helpers.models.te_models import IMPLS, build, fill, mesh
from tests.helpers.models.te_products import plain_products
from tests.helpers.models.tiny_models import VOCAB, farthest, ragged_tokens
from tests.helpers.rollout.engines import NEVER, largest_gap, make_requests, settings_of
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.te
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm"
MODELS = {
    "llama": ("llama", "--qk-layernorm --add-qkv-bias"),
    "gpt2": ("gpt2", ""),
    "post": ("llama", "--qk-layernorm-all-heads --layernorm-position post"),
    "sandwich": ("llama", "--layernorm-position sandwich --apply-layernorm-1p"),
    "experts": ("llama", EXPERTS),
    "shared experts": ("llama", f"{EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-layer-freq ([0]+[1]*1)"),
    "experts post": ("llama", f"{EXPERTS} --layernorm-position post"),
}


def results(impl, args, place):
    """(log-probs of packed sequences, tokens of the engine, gap of its log-probs, gradients by shard) of one spec."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.model.forward_pass import inference_mode, token_scores
    from megarl.mcore.weights.reshard_plan import model_weights

    (model,) = stages = build(impl, args, place.pg_collection)
    weights = model_weights(stages, place.pg_collection)
    fill(weights)
    for parameter in model.parameters():
        parameter.data.mul_(0.1 if parameter.dim() > 1 else 1)
    tokens, lengths = ragged_tokens([8, 1, 5, 3])
    with inference_mode(model):
        scores = token_scores(model, tokens, lengths, 0.7, VOCAB).logprobs
    requests = make_requests(limit=6, count=7)
    engine = RolloutEngine(model, place.pg_collection, VOCAB, 48, 0.005, 32)
    completions = engine.generate(requests, NEVER, settings_of(temperature=0.7))
    gap = largest_gap(model, requests, completions, 0.7)
    model.train()
    token_scores(model, tokens, lengths, 0.7, VOCAB).logprobs.mul(torch.linspace(-1, 2, len(tokens))).sum().backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    gradients = {shard: weights.view(shard).clone() for shard in weights.shards}
    return scores, [c.tokens for c in completions], gap, gradients


def both(rank, shape, flags):
    args, place = mesh(flags, shape)["actor"]
    local = results(IMPLS[0], args, place)
    with plain_products():
        return local, results(IMPLS[1], args, place)


@pytest.mark.parametrize("model", MODELS)
def test_both_specs_compute_the_same(model):
    ((local, other),) = run_world(both, 1, *MODELS[model])
    assert torch.isfinite(local[0]).all() and local[0].std() > 0.1
    assert farthest(other[0], local[0]) < 1e-4
    assert other[1] == local[1] and other[2] < 1e-4
    assert local[3].keys() == other[3].keys()
    for shard, gradient in local[3].items():
        assert (other[3][shard] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), shard
