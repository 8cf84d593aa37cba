"""Scores of whole sequences: the scalar head at the last token, the same in every layout and for every packing."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.layouts import CP2, DENSE, EP2, MOE, PP2, SP, TP2, VP2
from tests.helpers.models.tiny_models import VOCAB, draw_vectors, farthest, join_actor, ragged_tokens
from tests.helpers.models.updates import split_microbatches
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

FSDP = "--use-torch-fsdp2"
LENGTHS = [5, 4, 9, 17, 7, 33, 8, 4]  # none shorter than MIN_ROWS: it may be alone in a micro-batch
LAYOUTS = {  # ranks, shape, layout, largest difference to one rank: other orders of summation leave one
    "one": (1, DENSE, "", 0.0),
    "pp2": (2, DENSE, PP2, 0.0),
    "sharded-dp2": (2, DENSE, FSDP, 0.0),
    "tp2-sp": (2, DENSE, f"{TP2} {SP}", 3e-5),
    "cp2": (2, DENSE, CP2, 3e-5),
    "tp2-pp2-vp2": (4, DENSE, f"{TP2} {PP2} {VP2}", 3e-5),
    "ep2": (2, MOE, EP2, 0.0),
    "tp2-ep2-sp": (2, MOE, f"{TP2} {SP} {EP2}", 3e-5),
}


def frozen(flags: str):
    """(model, role groups) of a frozen model with a scalar head of random weights: 0 would hide errors."""
    from megarl.mcore.model.gpt import build_frozen_model

    args, place = join_actor(flags.replace(FSDP, ""))
    stages = build_frozen_model(args, VOCAB, place.pg_collection, value_head=True)
    for chunk in stages:
        draw_vectors(chunk, place.pg_collection)
        if chunk.post_process:
            chunk.output_layer.weight.data.copy_(torch.linspace(-0.2, 0.3, 64).unsqueeze(0))
            chunk.output_layer.bias.data.fill_(0.5)
        assert not any(p.requires_grad for p in chunk.parameters()) and not chunk.training
    if FSDP in flags:  # what is sharded cannot be drawn as above
        from megarl.mcore.parallel.fsdp import shard

        for chunk in stages:
            shard(chunk, place.pg_collection)
    return stages, place


def scores(rank, flags: str) -> list:
    """[N] scores of the sequences, in 1 and in 5 micro-batches, some of them blank."""
    from megarl.batch import Batch
    from megarl.mcore.model.forward_pass import sequence_scores
    from megarl.roles.passes import forward_only

    stages, place = frozen(flags)
    tokens, lengths = ragged_tokens(LENGTHS)
    batch = Batch(sequence_ids=torch.arange(len(lengths)), lengths=lengths, tokens=tokens)
    found = []
    for count in (1, 5, 9):
        parts = split_microbatches(batch, count, dist.get_world_size(place.pg_collection.pp) if len(stages) > 1 else 1)
        whole = torch.zeros(len(lengths))
        for values, places in forward_only(
            stages, parts, lambda chunk, part: sequence_scores(chunk, part.tokens, part.lengths), place.pg_collection
        ):
            if len(places):
                whole[places] = values
        found.append(whole)
    return found


@functools.cache
def single(shape: str) -> torch.Tensor:
    return run_world(scores, 1, shape)[0][0]


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("pp2", "cp2", "tp2-ep2-sp")))
def test_scores_do_not_depend_on_layout_and_packing(layout):
    size, shape, flags, tolerance = LAYOUTS[layout]
    expected = single(shape)
    assert expected.dtype == torch.float32 and len(expected.unique()) == len(LENGTHS)
    for found in run_world(scores, size, f"{shape} {flags}"):
        for whole in found:
            assert farthest(whole, expected) <= max(tolerance, largest_gap_allowed()), layout


def plain(rank):
    """Scores of single sequences: the head in float64 on the decoder's output at the last token."""
    from megarl.mcore.model.forward_pass import sequence_scores, token_values

    stages, _ = frozen(DENSE)
    (chunk,), captured = stages, {}
    chunk.decoder.register_forward_hook(lambda module, inputs, output: captured.update(hidden=output))
    tokens, lengths = ragged_tokens(LENGTHS)
    packed = sequence_scores(chunk, tokens, lengths)
    for part, score in zip(tokens.split(LENGTHS), packed, strict=True):
        alone = sequence_scores(chunk, part, torch.tensor([len(part)]))
        weight, last = chunk.output_layer.weight[0].double(), captured["hidden"][-1, 0].double()
        assert float((last @ weight + 0.5 - score).abs()) <= 1e-5
        assert farthest(alone, score) <= largest_gap_allowed()
        # A critic says it of the state before the token that would follow.
        longer = torch.cat([part, torch.tensor([3])])
        values = token_values(chunk, longer, torch.tensor([len(longer)]))
        assert farthest(values[-1], score) <= largest_gap_allowed()
    return True


def test_a_score_is_the_head_at_the_last_token():
    assert run_world(plain, 1) == [True]
