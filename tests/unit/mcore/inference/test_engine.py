"""The rollout engine: responses that do not depend on batching, log-probs of the training forward, no weight copy."""

import functools

import pytest
import torch

from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.model.forward_pass import inference_mode, token_scores
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.tiny_models import SHAPES, VOCAB
from tests.helpers.rollout.engines import (
    COUNT,
    LIMIT,
    NEVER,
    generate_standard,
    largest_gap,
    make_engine,
    make_requests,
    settings_of,
    standard,
    texts,
)
from tests.helpers.worlds import run_world

# -- responses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 4}, {"top_p": 0.8},
                                      {"greedy": True, "temperature": 0.7}], ids=str)  # fmt: skip
def test_log_probs_are_those_of_the_training_forward(shape, sampling):
    completions, gap = run_world(functools.partial(generate_standard, sampling=sampling), 1, "", shape)[0]
    assert gap <= largest_gap_allowed()
    assert sampling.get("greedy") or len({tuple(tokens) for tokens in texts(completions)}) > COUNT / 2
    assert all(0 <= token < VOCAB for tokens in texts(completions) for token in tokens)
    assert all(c.logprobs and max(c.logprobs) <= 0 for c in completions)


@pytest.mark.parametrize("engine_settings", [
    {"max_requests": 4}, {"max_requests": 1}, {"buffer_gb": 0.0002}, {"buffer_gb": 0.0002, "max_requests": 3},
], ids=str)  # fmt: skip
def test_responses_do_not_depend_on_cache_size_and_concurrency(engine_settings):
    completions, gap = run_world(functools.partial(generate_standard, **engine_settings), 1)[0]
    assert texts(completions) == texts(standard()[0]) and gap <= largest_gap_allowed()


@pytest.mark.parametrize("shape", SHAPES)
def test_two_tensor_ranks_generate_the_same_responses(shape):
    one, _ = standard(shape)
    for completions, gap in run_world(generate_standard, 2, "--tensor-model-parallel-size 2", shape):
        assert texts(completions) == texts(one) and gap <= largest_gap_allowed()
        for mine, other in zip(completions, one, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=5e-5)


def test_replicas_generate_their_own_requests():
    def one_share(rank):
        engine, _, place = make_engine()
        return engine.generate(make_requests()[place.dp_rank :: 2], NEVER, settings_of())

    first, second = run_world(one_share, 2)
    assert texts(first) == texts(standard()[0])[0::2] and texts(second) == texts(standard()[0])[1::2]


def in_other_orders(rank):
    engine, _, _ = make_engine()
    requests = make_requests()
    alone = [engine.generate([request], NEVER, settings_of())[0] for request in requests]
    backwards = engine.generate(requests[::-1], NEVER, settings_of())[::-1]
    return texts(alone), texts(backwards)


def test_a_response_does_not_depend_on_other_requests():
    ((alone, backwards),) = run_world(in_other_orders, 1)
    assert alone == backwards == texts(standard()[0])


def samples_of_one_prompt(rank):
    engine, model, _ = make_engine()
    prompt = make_requests()[1].prompt
    requests = [GenerationRequest(prompt, key, LIMIT) for key in (5, 6, 7, 5)]
    completions = engine.generate(requests, NEVER, settings_of())
    return texts(completions), largest_gap(model, requests, completions, 1.0)


def test_samples_of_one_prompt_follow_their_keys():
    (((one, two, three, again), gap),) = run_world(samples_of_one_prompt, 1)
    assert one == again and len({tuple(one), tuple(two), tuple(three)}) == 3 and gap <= largest_gap_allowed()


def greedy_both_ways(rank, shape):
    engine, model, _ = make_engine(shape=shape)
    requests = make_requests(count=6)
    own = model.output_layer.weight
    head = model.embedding.word_embeddings.weight if own is None else own
    hidden = []
    hook = model.decoder.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    expected = []
    with inference_mode(model):
        for request in requests:
            row = list(request.prompt)
            for _ in range(LIMIT):
                token_scores(model, torch.tensor(row), torch.tensor([len(row)]), 1.0, VOCAB)
                row.append(int((hidden.pop()[-1, 0] @ head[:VOCAB].T).argmax()))
            expected.append(row[len(request.prompt) :])
    hook.remove()
    return texts(engine.generate(requests, NEVER, settings_of(greedy=True))), expected, \
        texts(engine.generate(requests, NEVER, settings_of(top_k=1)))  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_decoding_equals_an_argmax_loop_over_the_full_forward(shape):
    greedy, expected, top_1 = run_world(greedy_both_ways, 1, shape)[0]
    assert greedy == expected == top_1


# -- weights and memory ------------------------------------------------------------------------------------------


def training_inside_and_after(rank):
    engine, model, _ = make_engine()
    messages, original = [], engine.sampling.sample_kernel

    def train_in_between(*args, **kwargs):
        try:
            token_scores(model, torch.tensor([1, 2]), torch.tensor([2]), 1.0, VOCAB)
        except RuntimeError as error:
            messages.append(str(error))
        return original(*args, **kwargs)

    engine.sampling.sample_kernel = train_in_between
    engine.generate(make_requests(limit=2), NEVER, settings_of())

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    engine.sampling.sample_kernel = fail
    with pytest.raises(ZeroDivisionError):
        engine.generate(make_requests(limit=2), NEVER, settings_of())
    assert model.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    scores = token_scores(model, torch.arange(9), torch.tensor([4, 5]), 1.0, VOCAB)
    scores.logprobs.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    engine.sampling.sample_kernel = original
    return messages, texts(engine.generate(make_requests(), NEVER, settings_of()))


def test_training_is_rejected_during_generation_and_works_after_it():
    messages, after = run_world(training_inside_and_after, 1)[0]
    assert len(messages) >= 2 and all("suspend the engine" in message for message in messages)
    assert after == texts(standard()[0])
