"""The rollout engine: responses that do not depend on batching, log-probs of the training forward, no weight copy."""

import functools
import gc
import itertools

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
from tests.helpers.tiers import by_default
from tests.helpers.worlds import on_each_rank, run_world

SAMPLINGS = [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 4}, {"top_p": 0.8},
             {"greedy": True, "temperature": 0.7}]  # fmt: skip
CASES = [*(("llama", sampling) for sampling in SAMPLINGS), *((shape, SAMPLINGS[1]) for shape in SHAPES)]


@pytest.mark.parametrize("shape, sampling", by_default(itertools.product(SHAPES, SAMPLINGS), CASES), ids=str)
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


# The others by default in tests/distributed/test_engine_layouts.py.
@pytest.mark.parametrize("shape", by_default(SHAPES, ("gpt2", "llama")))
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


@on_each_rank()
def test_samples_of_one_prompt_follow_their_keys(rank):
    engine, model, _ = make_engine()
    prompt = make_requests()[1].prompt
    requests = [GenerationRequest(prompt, key, LIMIT) for key in (5, 6, 7, 5)]
    completions = engine.generate(requests, NEVER, settings_of())
    one, two, three, again = map(tuple, texts(completions))
    assert one == again and len({one, two, three}) == 3
    assert largest_gap(model, requests, completions, 1.0) <= largest_gap_allowed()


@pytest.mark.parametrize("shape", SHAPES)
@on_each_rank()
def test_greedy_decoding_equals_an_argmax_loop_over_the_full_forward(rank, shape):
    engine, model, _ = make_engine(shape=shape)
    requests = make_requests(count=5)[1:]
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
    for settings in (settings_of(greedy=True), settings_of(top_k=1)):
        assert texts(engine.generate(requests, NEVER, settings)) == expected


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


def models_of_process() -> int:
    gc.collect()
    return sum(any(kind.__name__ == "GPTModel" for kind in type(thing).__mro__) for thing in gc.get_objects())


def after_an_update(rank, shape):
    held = models_of_process()  # of tests before, in the process that this one was forked from
    engine, model, _ = make_engine(shape=shape)
    requests = make_requests()
    places = [p.data_ptr() for p in model.parameters()]
    before = texts(engine.generate(requests, NEVER, settings_of()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    changed = engine.generate(requests, NEVER, settings_of())
    gap = largest_gap(model, requests, changed, 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1.1)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert engine.model is model
    assert models_of_process() == held + 1  # no copy anywhere
    return before, texts(changed), gap


@pytest.mark.parametrize("shape", ["llama", "recurrent"])  # its states of old weights are not read
def test_the_engine_generates_with_the_models_own_parameters(shape):
    before, changed, gap = run_world(after_an_update, 1, shape)[0]
    assert before == texts(standard(shape)[0]) and changed != before and gap <= largest_gap_allowed()


def with_garbage_in_the_cache(rank, shape):
    engine, _, _ = make_engine(shape=shape)
    buffer = engine.context.memory_buffer
    assert isinstance(buffer, torch.Tensor) and buffer.is_contiguous()
    assert buffer.untyped_storage().nbytes() == buffer.nbytes
    assert 0.7 * 0.005 * 2**30 < buffer.nbytes <= 0.005 * 2**30
    place = buffer.data_ptr()
    buffer.fill_(float("nan"))
    completions = engine.generate(make_requests(), NEVER, settings_of())
    assert engine.context.memory_buffer.data_ptr() == place
    assert not engine.context.memory_buffer.isnan().all()
    return texts(completions)


@pytest.mark.parametrize("shape", ["llama", "latent"])
def test_the_cache_is_one_buffer_and_its_old_contents_do_not_matter(shape):
    assert run_world(with_garbage_in_the_cache, 1, shape)[0] == texts(standard(shape)[0])


def waits_and_states(rank):
    """Calls that wait for the device while an engine is built and generates twice; whether it can step before, within
    and after a session; responses."""
    waits, synchronize = [], torch.cuda.synchronize
    torch.cuda.synchronize = lambda *args: waits.append(args)
    try:
        engine, _, _ = make_engine()
        generated = [texts(engine.generate(make_requests(), NEVER, settings_of())) for _ in range(2)]
    finally:
        torch.cuda.synchronize = synchronize
    states = [engine.engine.state.name]
    with engine.session():
        states.append(engine.engine.state.name)
    return waits, [*states, engine.engine.state.name], generated


def test_no_call_waits_for_the_device_when_the_engine_starts_or_ends():
    ((waits, states, (first, second)),) = run_world(waits_and_states, 1)
    assert not waits and states == ["SUSPENDED", "RUNNING", "SUSPENDED"]
    assert first == second == texts(standard()[0])
