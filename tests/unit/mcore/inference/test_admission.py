"""Adding all waiting prompts at once leaves the engine as Megatron's own scheduling does, one prompt at a time."""

import functools
import types
from dataclasses import replace

import pytest
import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference import admission
from megarl.mcore.inference import engine as engine_module
from megarl.mcore.inference.engine import RequestList
from megarl.mcore.inference.generation_session import GenerationSession
from tests.helpers.models import reference_kernels
from tests.helpers.rollout.engines import make_engine, make_requests, take_long_steps
from tests.helpers.worlds import on_each_rank, run_world

COUNT = 20


def requests_that(share):
    """Requests; the prompts of those that share begin with one of three texts of 40 tokens."""
    requests = make_requests(9, COUNT)
    if not share:
        return requests
    begins = [(requests[i].prompt * 40)[:40] for i in (1, 2, 3)]
    return [replace(one, prompt=[*begins[i // 2 % 3], *one.prompt][: 38 + i]) for i, one in enumerate(requests)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("max_requests", "buffer_gb", "step_tokens", "waiting"), [
    (32, 0.005, 4096, 0), (8, 0.005, 4096, 1), (32, 0.005, 100, 1), (32, 0.0001, 4096, 1),
])  # fmt: skip
@on_each_rank()
def test_the_context_is_that_of_megatrons_scheduling(rank, max_requests, buffer_gb, step_tokens, waiting, share):
    """After prompts were scheduled in two parts."""

    def state(schedule):
        engine, *_ = make_engine(max_length=80, buffer_gb=buffer_gb, max_requests=max_requests, prefix_caching=share)
        inner, context, source = engine.engine, engine.context, RequestList(enumerate(requests_that(share)))
        context.max_tokens = step_tokens
        inner.resume()
        engine.max_requests = COUNT  # more than the context holds, so that some wait
        session = GenerationSession(engine, (), SamplingSettings(), False)
        for in_engine in (COUNT // 2, COUNT):
            engine._admit(session, source, in_engine)
            schedule(inner)
        tensors = {name: value for name, value in vars(context).items() if isinstance(value, torch.Tensor)}
        tensors |= {f"metadata of {name}": value for name, value in context.request_metadata.items()}
        del tensors["memory_buffer"]
        active = slice(context.total_request_count), slice(context.active_token_count)
        # Beyond the requests and tokens of the step, Megatron's tensors are not initialized.
        tensors = {name: value[active["token_to" in name]].clone() if value.dim() else value.clone()
                   for name, value in tensors.items() if "gpu" not in name and "buf" not in name}  # fmt: skip
        numbers = {name: value for name, value in vars(context).items() if type(value) in (int, bool)}
        blocks = context.kv_block_allocator
        waiting = [inner.get_request(number).remaining_prompt_length for number in inner.waiting_request_ids]
        found = [inner.get_request(number).num_cached_tokens for number in range(COUNT // 2)]
        if share:
            tensors["uses"] = blocks.block_ref_counts.sort().values
            found.append(sorted(blocks.kv_hash_to_block_id))
        return tensors, numbers, waiting, blocks.total_avail, found

    ours, theirs = state(admission.add_waiting), state(DynamicInferenceEngine.schedule_non_chunked_prefill)
    assert ours[1:] == theirs[1:] and bool(ours[2]) == bool(waiting)
    assert ours[0].keys() == theirs[0].keys() and len(ours[0]) > 15
    assert (ours[1]["prefix_cache_hits"] > 0) == share
    for name, value in theirs[0].items():
        if name == "request_to_kv_block_ids":  # the free blocks are taken in another order
            assert torch.equal(ours[0][name] >= 0, value >= 0)
        elif "block_idx" not in name and name != "request_last_kv_block_id":
            assert torch.equal(ours[0][name], value), name


def steps(rank, only_long: bool, join_together: bool = False, requests: list | None = None, **sizes):
    """(completions, [(waiting, prefilling, decoding, whether it was a short one) of each step])."""
    if join_together:  # as on CUDA
        engine_module.device = types.SimpleNamespace(has_cuda=lambda: True)  # type: ignore[assignment]
        engine_module.JOIN_SHARE = 4

    engine, _, _ = make_engine(**sizes)
    found, inner, context = [], engine.engine, engine.context
    wrapper, advance = inner.controller.inference_wrapped_model, context.advance_decode
    forward = wrapper.forward_pass_without_pipeline_parallel

    def counted(inputs):
        prefilling = context.num_prefill_requests
        found.append((len(inner.waiting_request_ids), prefilling, context.total_request_count - prefilling, False))
        return forward(inputs)

    def short(tokens):
        found[-1] = (*found[-1][:3], True)
        return advance(tokens)

    wrapper.forward_pass_without_pipeline_parallel, context.advance_decode = counted, short
    if only_long:
        take_long_steps(engine)
    return engine.generate(requests or make_requests(9, COUNT), (3,), SamplingSettings()), found


def test_steps_are_short_while_requests_wait_for_cache():
    ((done, ours),) = run_world(functools.partial(steps, only_long=False, buffer_gb=0.0001), 1)
    ((all_done, theirs),) = run_world(functools.partial(steps, only_long=True, buffer_gb=0.0001), 1)
    assert done == all_done
    assert [step[:3] for step in ours] == [step[:3] for step in theirs] and not any(step[3] for step in theirs)
    assert sum(is_short and waiting > 0 for waiting, _, _, is_short in ours) > 2


def test_every_step_without_a_prompt_is_short_and_requests_may_join_together():
    """Also those after requests join or end: on CUDA they are graphs, and steps in which requests join are not."""
    ((done, one_by_one),) = run_world(functools.partial(steps, only_long=False, max_requests=8), 1)
    ((same, together),) = run_world(functools.partial(steps, only_long=False, max_requests=8, join_together=True), 1)
    assert done == same
    joins = [[prefilling for _, prefilling, _, _ in found if prefilling] for found in (one_by_one, together)]
    assert sum(joins[0]) == sum(joins[1]) == COUNT and 1 in joins[0]
    assert min(joins[1][:-1]) >= 2 and len(joins[1]) < len(joins[0])
    for found in (one_by_one, together):
        assert all(is_short == (prefilling == 0) for _, prefilling, _, is_short in found)


def ragged_steps(rank):
    """Steps of a replica that shares experts in which it has prompts."""
    reference_kernels.use_them()
    flags = "--attention-backend varlen --num-experts 4 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2"
    limits = torch.randint(1, 10, (COUNT,), generator=torch.Generator().manual_seed(rank)).tolist()
    requests = [replace(one, max_new_tokens=n) for one, n in zip(make_requests(9, COUNT), limits, strict=True)]
    done, found = steps(rank, False, True, requests, flags=flags, max_requests=8)
    assert [len(one.tokens) for one in done if not one.finished] == [
        n for n, one in zip(limits, done, strict=True) if not one.finished
    ]
    return {number for number, (_, prefilling, _, _) in enumerate(found) if prefilling}


def test_replicas_that_share_experts_join_together():
    """A step in which requests join on one of them is a graph on none."""
    joins, others = run_world(ragged_steps, 2)
    last = min(max(joins), max(others))  # then one of them has no more requests
    assert {step for step in joins if step <= last} == {step for step in others if step <= last}
    assert min(len(joins), len(others)) >= 4
