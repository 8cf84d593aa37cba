"""Speculative decoding: the same tokens and log-probs to the bit, whatever is drafted; a layer of multi-token
prediction drafts the guesses of a forward over the text."""

import copy
import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms.token_sampling import uniforms
from megarl.mcore.inference.device_decode import DeviceDecode
from megarl.mcore.inference.draft_index import MAX_CONTEXT
from megarl.mcore.inference.drafter import FIRST_RATE, PREDICTED, Drafter, Drafts, StepCosts
from megarl.mcore.inference.speculative_decode import SpeculativeEngine, costs_of, parameters_of_a_token
from megarl.mcore.model.forward_pass import inference_mode, run_chunk
from megarl.mcore.model.prediction_layer import PredictionLayer
from tests.helpers.models import reference_kernels
from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.rollout.engines import (
    NEVER,
    are_same,
    assert_all_blocks_are_free,
    engine_on,
    make_requests,
    settings_of,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import on_each_rank, run_world

LONG = 23  # new tokens: two to four blocks of 16 with the prompt
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
PP2 = "--pipeline-model-parallel-size 2"
WINDOW = "--window-size 20,0 --window-attn-skip-freq 2"


def scripted_drafter(answers, kind: str):
    """A drafter that knows the answers, token lists by request: its drafts are right, wrong, random or mixed."""

    class Scripted(Drafter):
        def __init__(self):
            super().__init__(StepCosts.on_cpu(10**5, 2, 1)._replace(drafting=0.0), 32, 48)
            self.generator, self.numbers, self.begun = random.Random(0), {}, 0

        def begin(self, request_id, prompt):
            super().begin(request_id, prompt)
            self.numbers[int(self.rows_of(request_id))] = self.begun  # the engine adds requests in their order
            self.begun += 1

        def should_look(self, count):
            return True

        def draft(self, rows, room, sizes, max_rows, predicted=None):
            drafts, used = [], len(rows)
            for row, limit in zip(rows, room, strict=True):
                answer, size = answers[self.numbers[row]], self._sequences.lengths[row]
                text = self._sequences._tokens[row, MAX_CONTEXT : MAX_CONTEXT + size].tolist()
                assert answer[:size] == text, "the drafter knows another text"
                # More than there is room for: the engine has to cut it.
                truths = [*answer[size:], 0, 0, 0][: min(limit + 2, max_rows - used)]
                draft = [self.token(truth) for truth in truths]
                used += len(draft)
                drafts.append(draft)
            tokens = np.array([token for draft in drafts for token in draft], np.int64)
            return Drafts(tokens, np.array([len(draft) for draft in drafts], np.int64))

        def token(self, truth):
            other = self.generator.randrange(VOCAB)
            is_right = {"right": True, "wrong": False, "mixed": self.generator.random() < 0.7, "random": None}[kind]
            if is_right is None:
                return other
            return truth if is_right else (truth + 1 + other % (VOCAB - 1)) % VOCAB

    return Scripted()


def with_and_without(rank, flags="", shape="llama", end=NEVER, sampling=None, count=20, limit=LONG, routes=False,
                     siblings=1, **settings):  # fmt: skip
    """(completions without drafts, {kind of drafts: (completions, decode counts)})."""
    model, _, place = build(flags, shape)
    requests, sampling = make_requests(limit, count, siblings), settings_of(**(sampling or {}))
    if "--expert-model" in flags:  # the other replica ends first, and then computes for this one alone
        requests = [replace(request, max_new_tokens=limit >> place.dp_rank) for request in requests]
    plain = engine_on(model, place, **settings).generate(requests, end, sampling, routes)
    engine, found = engine_on(model, place, **settings, always_drafts=True), {}
    own = engine.drafter
    answers = [request.prompt + completion.tokens for request, completion in zip(requests, plain, strict=True)]
    for kind in ("right", "wrong", "random", "mixed", "first", "again"):
        engine.drafter = engine.engine.drafter = own if kind in ("first", "again") else scripted_drafter(answers, kind)
        done = engine.generate(requests, end, sampling, routes)
        assert_all_blocks_are_free(engine)  # also those of rejected drafts
        found[kind] = done, engine.take_counts()
    return plain, found


@pytest.mark.parametrize(("ranks", "case"), [
    long((1, {})),
    long((1, {"end": (3, 5, 11)})),
    (1, {"end": (3,), "max_requests": 4, "count": 10, "sampling": {"temperature": 0.7, "top_k": 5}}),
    long((1, {"end": (3,), "buffer_gb": 0.0001, "max_requests": 6})),
    long((1, {"shape": "gpt2", "sampling": {"greedy": True}})),
    long((1, {"siblings": 5, "sampling": {"greedy": True}, "end": (3,)})),
    long((1, {"siblings": 5, "sampling": {"temperature": 0.2}, "end": (3, 5)})),
    (1, {"siblings": 4, "sampling": {"temperature": 0.2}, "buffer_gb": 0.0001, "max_requests": 6, "end": (3,)}),
    long((1, {"siblings": 4, "sampling": {"temperature": 0.3}, "shape": "latent", "end": (3,)})),
    long((1, {"siblings": 4, "sampling": {"temperature": 0.2}, "flags": EXPERTS, "end": (3,), "routes": True})),
    long((2, {"siblings": 4, "sampling": {"temperature": 0.2}, "flags": "--tensor-model-parallel-size 2"})),
    long((1, {"flags": WINDOW, "end": (3,)})),
    long((1, {"shape": "latent", "end": (3,)})),
    (1, {"shape": "recurrent", "end": (3,), "siblings": 4, "sampling": {"greedy": True}, "buffer_gb": 0.002}),
    long((1, {"shape": "recurrent", "end": (3,)})),
    (1, {"shape": "kimi", "end": (3,), "siblings": 4, "sampling": {"greedy": True}, "buffer_gb": 0.002}),
    long((2, {"shape": "ling", "flags": "--tensor-model-parallel-size 2", "end": (3,)})),
    long((1, {"shape": "mamba", "end": (3,), "siblings": 4, "sampling": {"greedy": True}, "buffer_gb": 0.004})),
    long((2, {"shape": "recurrent", "flags": "--tensor-model-parallel-size 2", "end": (3,)})),
    long((1, {"flags": "--final-logit-softcapping 3"})),
    (2, {"flags": PP2, "end": (3,), "count": 5}),
    long((2, {"flags": PP2, "end": (3,), "siblings": 4, "sampling": {"greedy": True}, "buffer_gb": 0.0001,
              "max_requests": 6})),
    long((2, {"flags": f"--num-layers 4 {PP2}", "shape": "recurrent", "end": (3,), "buffer_gb": 0.002})),
    long((4, {"flags": f"{PP2} --tensor-model-parallel-size 2", "max_requests": 4, "sampling": {"temperature": 0.7}})),
    long((4, {"flags": f"{EXPERTS} --expert-model-parallel-size 2 {PP2}", "end": (3,)})),
    long((1, {"flags": EXPERTS, "end": (3,), "routes": True})),
    long((2, {"flags": "--tensor-model-parallel-size 2", "end": (3,)})),
    long((2, {"flags": "--tensor-model-parallel-size 2 --sequence-parallel", "end": (3,), "count": 5})),
    (2, {"flags": f"{EXPERTS} --expert-model-parallel-size 2", "end": (3,), "routes": True, "count": 10}),
    long((2, {"flags": f"{EXPERTS} --expert-model-parallel-size 2", "shape": "recurrent", "buffer_gb": 0.004,
              "end": (3,)})),
], ids=str)  # fmt: skip
def test_drafts_change_no_bit(ranks, case):
    for plain, found in run_world(functools.partial(with_and_without, **case), ranks):
        for kind, (done, counts) in found.items():
            assert are_same(done, plain), kind
            assert counts.drafted > 0 or kind == "first"
        assert found["wrong"][1].accepted == 0 < found["mixed"][1].accepted
        assert found["again"][1].steps <= found["wrong"][1].steps


def planned_on_the_device(rank, flags="", **case):
    """As `with_and_without`; rows of the steps with drafts that the device planned, those of drafts among them."""
    reference_kernels.use_them()
    drafted, run = [], DeviceDecode.run

    def counted(self, rows):
        if self.context.draft_rows is not None:
            drafted.append(len(self.context.draft_rows.requests) - self.context.total_request_count)
        return run(self, rows)

    DeviceDecode.run = counted  # type: ignore[method-assign]
    return *with_and_without(rank, f"{flags} --attention-backend varlen", **case), drafted


@pytest.mark.parametrize(("ranks", "case"), [
    long((1, {"end": (3,)})), long((1, {"flags": EXPERTS, "routes": True})),
    long((1, {"siblings": 4, "buffer_gb": 0.0001})),
    (2, {"flags": "--tensor-model-parallel-size 2 --sequence-parallel", "end": (3,), "count": 5}),
    long((2, {"flags": PP2, "end": (3,), "sampling": {"temperature": 0.7}})),
], ids=str)  # fmt: skip
def test_the_device_plans_steps_with_drafts(ranks, case):
    for plain, found, drafted in run_world(functools.partial(planned_on_the_device, **case), ranks):
        assert len(drafted) > 20 and max(drafted) > 8
        for kind, (done, _) in found.items():
            for ours, theirs in zip(done, plain, strict=True):
                assert ours.tokens == theirs.tokens, kind
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
                assert ours.routes is theirs.routes is None or torch.equal(ours.routes, theirs.routes)
        assert found["wrong"][1].accepted == 0 < found["mixed"][1].accepted


@on_each_rank(2)
def test_replicas_that_share_experts_draft_nothing_in_steps_that_the_device_plans(rank):
    """They have agreed on a number of rows. All drafts would be right."""

    def failed(*_):
        raise AssertionError("drafts in a step of agreed rows")  # for which the other replica would wait

    reference_kernels.use_them()
    SpeculativeEngine._step_with_drafts = failed  # type: ignore[method-assign]
    model, _, place = build(f"{EXPERTS} --expert-model-parallel-size 2 --attention-backend varlen", "llama")
    requests = make_requests(8)[:3]
    plain = engine_on(model, place).generate(requests, NEVER, settings_of())
    engine = engine_on(model, place, speculative=True)
    answers = [request.prompt + completion.tokens for request, completion in zip(requests, plain, strict=True)]
    engine.drafter = engine.engine.drafter = scripted_drafter(answers, "right")
    assert [c.tokens for c in engine.generate(requests, NEVER, settings_of())] == [c.tokens for c in plain]
    counts = engine.take_counts()
    assert counts.steps == 7 and counts.drafted == 0


def test_right_drafts_need_one_step():
    limit = 17
    ((_, found),) = run_world(functools.partial(with_and_without, count=5, limit=limit, max_requests=64), 1)
    right, wrong = found["right"][1], found["wrong"][1]
    assert (wrong.steps, wrong.requests, wrong.tokens) == (limit - 1, 5 * (limit - 1), 5 * (limit - 1))
    assert (right.steps, right.requests, right.tokens) == (1, 5, 5 * (limit - 1))
    assert right.accepted == right.drafted == 5 * (limit - 2)


def costs(rank, flags):
    model, _, place = build(flags, "llama")
    torch.set_num_threads(1 + rank)
    whole = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return parameters_of_a_token(model), whole, experts, costs_of(model, place.pg_collection.pp)


def test_costs_count_the_experts_of_a_token_and_are_those_of_all_tensor_parallel_ranks():
    ((used, whole, experts, _),) = run_world(costs, 1, EXPERTS)
    assert used == whole - experts * 6 // 8 and experts > 0
    first, second = run_world(costs, 2, "--tensor-model-parallel-size 2")
    assert first == second and first[0] == first[1]
    first, second = run_world(costs, 2, f"{PP2} --num-layers 3 --decoder-first-pipeline-num-layers 1")
    assert first[0] < second[0] and first[-1] == second[-1]


# -- drafts by the layer of multi-token prediction -------------------------------------------------------------------


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
    sampling, requests = settings_of(**(sampling or {})), make_requests(LONG, count, siblings)
    if args.expert_model_parallel_size > 1:  # the other replica ends first, and then computes for this one alone
        requests = [replace(request, max_new_tokens=LONG >> place.dp_rank) for request in requests]
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
    return plain, done, engine.take_counts(), len(guessed), wrong


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
