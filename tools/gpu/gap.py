"""The gap between rollout log-probs and those of training's forward, in bf16: mean, 99th percentile, largest."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from tools.bench import common
from tools.gpu import report, run_all, sized

Watch = Callable[[torch.nn.Module], AbstractContextManager]
SHAPE = sized(common.Shape(layers=8, hidden=1024, ffn=2816, vocab=32_000, heads=16, groups=4),
              common.Shape(layers=1, hidden=64, ffn=64, vocab=64))  # fmt: skip
EXPERTS = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512"
SIZES = sized((64, 192, 64), (8, 6, 5))  # tokens of a prompt at most, tokens of a response, requests
CASES = {  # name -> (flags, whether training takes the rollout's routes, arXiv 2510.11370)
    "dense": ("", False),
    "dense, exact": ("--exact-rollout", False),
    "experts": (f"{EXPERTS} --moe-grouped-gemm", False),
    "experts, replayed": (f"{EXPERTS} --moe-grouped-gemm", True),
    "experts, replayed, exact": (f"{EXPERTS} --exact-rollout", True),
}


def unwatched(_model) -> AbstractContextManager:
    """Watches nothing."""
    return contextlib.nullcontext()


def gaps(
    flags: str, is_replayed: bool = False, shape: common.Shape = SHAPE, sizes: tuple[int, int, int] = SIZES,
    decode_graphs: bool = True, watch: Watch = unwatched, dtype: str = "bf16",
) -> torch.Tensor:  # fmt: skip
    """|rollout − training| of each token of responses to ragged prompts, [tokens] fp32 in nats.

    `sizes`: as `SIZES`; `watch`: returns the context of the rollout, then that of training's forward.
    """
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore import device
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    longest, response, count = sizes
    model, pg_collection, _ = common.build(shape, (longest, response), f"--{dtype} {flags}", "rl")
    engine = RolloutEngine(
        model, pg_collection, shape.vocab, longest + response, 0.5, count, decode_graphs=decode_graphs
    )
    prompts = common.random_prompts([1 + number * 37 % longest for number in range(count)], shape.vocab)
    requests = [GenerationRequest(prompt, key, response) for key, prompt in enumerate(prompts)]
    with watch(model):
        completions = engine.generate(requests, (), SamplingSettings(), is_replayed)
    rows = [prompt + completion.tokens for prompt, completion in zip(prompts, completions, strict=True)]
    lengths, tokens = torch.tensor([len(row) for row in rows]), torch.tensor(sum(rows, [])).to(device.device())
    routing = routing_of(engine, pg_collection, lengths, completions) if is_replayed else None
    with inference_mode(model), watch(model):
        scored = token_scores(model, tokens, lengths, 1.0, shape.vocab, routing)
    scores = scored.logprobs.cpu().split(lengths.tolist())
    pairs = zip(scores, prompts, completions, strict=True)
    return torch.cat([(row[len(prompt) :] - torch.tensor(found.logprobs)).abs() for row, prompt, found in pairs])


def routing_of(engine, pg_collection, lengths: torch.Tensor, completions: list):
    """The routes that the rollout has taken, for the forward pass over the same sequences of `lengths` [N]."""
    from megarl.mcore import device
    from megarl.mcore.attention.packing import routed_tokens
    from megarl.mcore.moe.routes import Routing

    routes = torch.cat([completion.routes for completion in completions]).to(device.device())
    rows = routed_tokens(lengths, pg_collection, False)
    experts = engine.model.config.num_moe_experts
    return Routing("actor", engine.layers, experts, rows, routes[rows.token_indices])


def gap(name: str) -> bool:
    """Reports the gap of a case; False for an exact rollout whose gap is not 0."""
    found = gaps(*CASES[name])
    report(gap=name, mean=float(found.mean()), p99=float(found.quantile(0.99)), max=float(found.max()))
    return "exact" not in name or float(found.max()) == 0.0


if __name__ == "__main__":
    run_all({name: functools.partial(gap, name) for name in CASES})
