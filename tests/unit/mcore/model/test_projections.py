"""Sizes of projections: those of the linear layers of a model that was built."""

import pytest

from tests.helpers.models.tiny_models import build
from tests.helpers.worlds import run_world

MODELS = [("", shape) for shape in ("llama", "gpt2", "latent", "recurrent", "kimi", "ling", "mamba")]
MODELS += [
    ("--attention-output-gate", "llama"),
    ("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32", "llama"),
]


def sizes_of(rank: int) -> list[tuple[dict, dict]]:
    """For each model (rows and columns by suffix as they are computed, those of its weights)."""
    from megarl.mcore.config.recurrent_rules import has_states
    from megarl.mcore.model import projections

    found = []
    for flags, shape in MODELS:
        model, args, _ = build(flags, shape)
        mlp = projections.expert_sizes(args) if args.num_experts else projections.mlp_sizes(args, args.ffn_hidden_size)
        mixers = projections.attention_sizes(args) | (projections.recurrent_sizes(args) if has_states(args) else {})
        computed, shapes = projections.linear_sizes(args, mixers | mlp), {}
        for name, parameter in model.decoder.named_parameters():
            for suffix in (each for each in computed if name.endswith(f"{each}.weight")):
                shapes.setdefault(suffix, set()).add(tuple(parameter.shape))
        found.append((computed, shapes))
    return found


def test_sizes_are_those_of_a_models_weights():
    (found,) = run_world(sizes_of, 1)
    for (flags, shape), (computed, shapes) in zip(MODELS, found, strict=True):
        assert shapes == {suffix: {size} for suffix, size in computed.items()}, (flags, shape)
        assert len(computed) >= 4


@pytest.mark.parametrize("groups, ranks, sharing, held", [(2, 1, 1, 2), (2, 2, 1, 1), (2, 4, 2, 1), (8, 2, 1, 4)])
def test_ranks_share_a_group_where_there_are_more_ranks(groups, ranks, sharing, held):
    from megarl.mcore.model.projections import HeadLayout

    heads = HeadLayout(groups, 16 // groups, 8)
    assert (heads.ranks_of_group(ranks), heads.groups_of_rank(ranks)) == (sharing, held)
    assert heads.heights == (16 // groups, 1, 1)
    assert heads._replace(has_gates=True).heights == (32 // groups, 1, 1)
