"""Initial weights: they depend on the seed and their names alone, and are drawn as the config says."""

import itertools

import pytest
import torch

from tests.helpers.models.tiny_models import build
from tests.helpers.worlds import run_world


def test_data_parallel_replicas_start_with_the_same_weights():
    one, two = run_world(lambda rank: [p.detach() for p in build("")[0].parameters()], 2)
    assert all(map(torch.equal, one, two))


def test_weights_are_named_by_layer_and_drawn_as_the_config_says():
    def drawn(rank):
        found = {}
        for seed, flags in itertools.product((1, 2), ("", "--num-experts 4 --moe-router-topk 2")):
            model, *_ = build(f"--num-layers 4 --seed {seed} {flags}")
            found[seed, flags] = {name: p.detach().clone() for name, p in model.named_parameters()}
        return found

    (models,) = run_world(drawn, 1)
    dense, other, experts = models[1, ""], models[2, ""], models[1, "--num-experts 4 --moe-router-topk 2"]
    first, second = (dense[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other["decoder.layers.0.self_attention.linear_qkv.weight"])
    assert torch.equal(first, experts["decoder.layers.0.self_attention.linear_qkv.weight"])
    embeddings = (model["embedding.word_embeddings.weight"] for model in (dense, other))
    assert not torch.equal(*embeddings)
    gates, ups = dense["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    assert abs(float(torch.corrcoef(torch.stack([gates.flatten(), ups.flatten()]))[0, 1])) < 0.05
    matrices = [experts[f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight"] for i in range(4)]
    assert len({float(m.sum()) for m in matrices}) == 4
    assert float(first.std()) == pytest.approx(0.1, rel=0.05)
    deep = torch.cat([dense[f"decoder.layers.{i}.mlp.linear_fc2.weight"].flatten() for i in range(4)])
    assert float(deep.std()) == pytest.approx(0.1 / (2 * 4) ** 0.5, rel=0.05)
    assert not any(p.isnan().any() for p in experts.values())
