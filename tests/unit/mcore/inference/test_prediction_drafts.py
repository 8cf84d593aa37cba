"""Drafts by a layer of multi-token prediction: the same text to the bit, and the guesses of a forward over the text."""

import copy
import functools
from dataclasses import replace

import pytest
import torch

from megarl.algorithms.token_sampling import uniforms
from megarl.mcore.inference.drafter import FIRST_RATE, PREDICTED
from megarl.mcore.model.forward_pass import inference_mode, run_chunk
from megarl.mcore.model.prediction_layer import PredictionLayer
from tests.helpers.models.tiny_models import build
from tests.helpers.rollout.engines import (
    NEVER,
    are_same,
    assert_all_blocks_are_free,
    engine_on,
    make_requests,
    settings_of,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

LIMIT = 23
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
TP2, EP2 = "--tensor-model-parallel-size 2", "--expert-model-parallel-size 2"


def expected_guesses(model, layer, rows, draw) -> list[list[int]]:
    """For each sequence and token, what the layer draws as the token after the next one, by one packed forward. `draw`:
    (logits [T, V] of a sequence, its number) -> tokens [T]."""
    tokens, lengths = torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows])

    def predict(hidden, output_layer, weight, targets, packing, of):
        own = copy.copy(packing)
        own.routing = None
        embedded, frequencies, *_ = of._preprocess(
            targets.unsqueeze(0), packing.positions.unsqueeze(0), packed_seq_params=own
        )
        predicted = layer(hidden.unsqueeze(1), embedded, frequencies, own)
        return output_layer(predicted, weight=weight, runtime_gather_output=True)[0].squeeze(1)

    with inference_mode(model):
        logits = run_chunk(model, tokens, lengths, predict, None, None)[: len(tokens)]
    return [draw(of_row, number).tolist() for number, of_row in enumerate(logits.split(lengths.tolist()))]


def with_predictions(rank, flags="", shape="llama", end=NEVER, sampling=None, count=20, siblings=1, routes=False,
                     **settings):  # fmt: skip
    """(completions without drafts, with them, decode counts, compared guesses, those that differ)."""
    model, args, place = build(flags, shape)
    layer = PredictionLayer(args, place.pg_collection).requires_grad_(False)
    sampling, requests = settings_of(**(sampling or {})), make_requests(LIMIT, count, siblings)
    if args.expert_model_parallel_size > 1:  # the other replica ends first, and then computes for this one alone
        requests = [replace(request, max_new_tokens=LIMIT >> place.dp_rank) for request in requests]
    plain = engine_on(model, place, **settings).generate(requests, end, sampling, routes)
    engine = engine_on(model, place, **settings, speculative=True, prediction=layer)
    engine.drafter.costs = engine.drafter.costs._replace(drafting=0.0)  # drafts always pay
    drafts, guessed = engine.engine.prediction, []
    guess = drafts._guess

    def spy(hidden, rows, ids, positions):
        guess(hidden, rows, ids, positions)
        keys = engine.sampling.keys[ids].tolist()
        guessed.extend(zip(keys, positions.tolist(), drafts.guesses(ids.numpy()).tolist(), strict=True))

    drafts._guess = spy
    done = engine.generate(requests, end, sampling, routes)
    assert_all_blocks_are_free(engine)  # also those of rejected drafts
    sequences = [request.prompt + found.tokens for request, found in zip(requests, plain, strict=True)]

    def draw(logits, number):
        positions = torch.arange(len(logits)) + 2
        keys = torch.full((len(logits),), requests[number].key)
        return engine.sampling._sample(logits.contiguous(), uniforms(keys, positions), sampling)

    engine.sampling.reset(sampling, 32)
    expected = expected_guesses(model, layer, sequences, draw)
    numbers = {request.key: number for number, request in enumerate(requests)}
    wrong = [
        (numbers[key], at) for key, at, token in guessed
        if at < len(sequences[numbers[key]]) and token != expected[numbers[key]][at - 1]
    ]  # fmt: skip
    assert engine.drafter.rates[PREDICTED] != FIRST_RATE, "no guess of the layer was tried"
    return plain, done, engine.take_decode_counts(), len(guessed), wrong


@pytest.mark.parametrize(("ranks", "case", "is_exact"), [
    (1, {"end": (3, 5)}, True),
    (1, {"shape": "latent", "flags": EXPERTS, "routes": True}, True),
    (1, {"shape": "recurrent", "sampling": {"greedy": True}, "buffer_gb": 0.002, "end": (3,)}, True),
    long((1, {"shape": "recurrent", "siblings": 4, "prefix_caching": True, "max_requests": 6, "end": (3,)}, False)),
    long((1, {"max_requests": 4, "sampling": {"temperature": 0.7, "top_k": 5}, "end": (3,)}, True)),
    long((1, {"siblings": 4, "sampling": {"temperature": 0.2}, "buffer_gb": 0.0001, "max_requests": 6, "end": (3,)},
          False)),
    (1, {"siblings": 5, "sampling": {"temperature": 0.2}, "end": (3,)}, False),
    long((2, {"flags": TP2, "end": (3,)}, True)),
    long((1, {"shape": "gpt2", "sampling": {"greedy": True}}, True)),
    (2, {"flags": f"{TP2} --sequence-parallel", "count": 5}, True),
    long((2, {"shape": "recurrent", "flags": TP2, "end": (3,)}, True)),
    long((1, {"chunked_prefill": True, "step_tokens": 34, "sampling": {"greedy": True}}, True)),
    long((1, {"shape": "latent", "flags": EXPERTS, "chunked_prefill": True, "step_tokens": 40}, True)),
    (2, {"flags": f"{EXPERTS} {EP2}", "end": (3, 5), "routes": True}, True),
    long((2, {"shape": "recurrent", "flags": f"{EXPERTS} {EP2}", "max_requests": 8, "buffer_gb": 0.002}, True)),
    long((2, {"shape": "latent", "flags": f"{EXPERTS} {EP2}", "chunked_prefill": True, "step_tokens": 40}, True)),
    long((4, {"flags": f"{EXPERTS} {EP2} {TP2} --sequence-parallel", "end": (3,)}, True)),
], ids=str)  # fmt: skip
def test_predictions_change_no_bit_and_are_those_of_a_forward_over_the_text(ranks, case, is_exact):
    """Not `is_exact`: requests share rows, whose keys are those of the one that was read."""
    for plain, done, counts, guessed, wrong in run_world(functools.partial(with_predictions, **case), ranks):
        assert are_same(done, plain)
        assert 0 < counts.accepted < counts.drafted and guessed > 50
        assert wrong == [] or not is_exact
