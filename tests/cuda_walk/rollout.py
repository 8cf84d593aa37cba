"""Walks rollouts of tiny models on a device without hardware."""

import dataclasses
import functools

from tests.cuda_walk.device import Walk
from tests.helpers.models.tiny_models import CHOOSING, VOCAB, join_actor
from tests.helpers.rollout.engines import make_requests, settings_of

GRAPHS = {"captures": True, "limit": 12}
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"
SPLIT = {"chunked_prefill": True, "step_tokens": 12, "max_requests": 8}


def generate(
    walk: Walk, flags: str = "", shape: str = "llama", limit: int = 6, routes: bool = False, sampling=None,
    block: int = 16, count: int = 8, ragged: bool = False, program: str = "sft", has_graphs: bool = True,
    captures: bool = False, **engine_settings,
) -> list:  # fmt: skip
    """One entry a step: prefilled requests, sends, reads, launches, attention shapes, graphs captured and replayed.

    `block`: tokens of a block of the cache, 0: megarl's choice; `ragged`: requests end at different times;
    `has_graphs`: whether decode steps of the model can be CUDA graphs; `captures`: they are, without kernels.
    """
    from megarl.mcore.inference import device_decode
    from megarl.mcore.inference import engine as engine_module
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.model import gpt

    args, place = join_actor(f"--bf16 {flags}", shape, program)
    (model,) = gpt.build_model(args, VOCAB, place.pg_collection)
    arguments = {"buffer_gb": 0.01, "max_requests": 32} | engine_settings
    engine_module.BLOCK_TOKENS = block or engine_module.BLOCK_TOKENS
    engine = RolloutEngine(model, place.pg_collection, VOCAB, 48, **arguments)
    assert device_decode.can_capture(model) == has_graphs
    engine.engine.device_decode.has_graphs = captures
    real, steps = engine.engine.step_modern, []

    def step():
        walk.clear()
        prefills = engine.context.num_prefill_requests + len(engine.engine.waiting_request_ids)
        result = real()
        steps.append({"prefills": prefills, "graphs": [walk.captures, walk.replays], **walk.counts()})
        return result

    engine.engine.step_modern = step
    requests = make_requests(limit, count)
    for number, request in enumerate(requests if ragged else ()):
        requests[number] = dataclasses.replace(request, max_new_tokens=1 + 7 * number % limit)
    completions = engine.generate(requests, (), settings_of(**(sampling or {})), routes)
    assert [len(completion.tokens) for completion in completions] == [request.max_new_tokens for request in requests]
    assert not routes or all(completion.routes is not None for completion in completions)
    return steps


_SETTINGS: dict[str, dict] = {
    "dense": {},
    "graphs": GRAPHS,
    "graphs, experts": {"flags": EXPERTS, "routes": True, **GRAPHS},
    "greedy": {"sampling": {"greedy": True}},
    "restricted": {"sampling": {"top_k": 5, "top_p": 0.9}},
    "experts": {"flags": EXPERTS, "routes": True},
    "window": {"flags": "--window-size 5,0"},
    "prefix caching": {"prefix_caching": True},
    "chunked prefill": SPLIT,
    "eviction": {"buffer_gb": 0.0005, "max_requests": 8},
    "speculative": {"speculative": True},
    "softcap": {"flags": "--attn-logit-softcapping 5"},
    "latent": {"shape": "latent"},
    "chosen keys": {"shape": "latent", "flags": CHOOSING},
    "long": {"flags": "--num-layers 1", "count": 150, "limit": 23, "ragged": True, "max_requests": 9, "block": 0},
}
SCENARIOS = {  # name -> (what walks, ranks)
    name: (functools.partial(generate, **settings), 1) for name, settings in _SETTINGS.items()
}
