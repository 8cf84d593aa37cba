"""An engine between its calls: the model's own parameters, one buffer, and no wait for the device."""

import gc

import torch

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.rollout.engines import NEVER, largest_gap, make_engine, make_requests, settings_of, standard, texts
from tests.helpers.worlds import run_world


def models_of_process() -> int:
    gc.collect()
    return sum(any(kind.__name__ == "GPTModel" for kind in type(thing).__mro__) for thing in gc.get_objects())


def after_an_update(rank):
    held = models_of_process()  # of tests before, in the process that this one was forked from
    engine, model, _ = make_engine()
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


def test_the_engine_generates_with_the_models_own_parameters():
    before, changed, gap = run_world(after_an_update, 1)[0]
    assert before == texts(standard()[0]) and changed != before and gap <= largest_gap_allowed()


def with_garbage_in_the_cache(rank):
    engine, _, _ = make_engine()
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


def test_the_cache_is_one_buffer_and_its_old_contents_do_not_matter():
    assert run_world(with_garbage_in_the_cache, 1)[0] == texts(standard()[0])


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
