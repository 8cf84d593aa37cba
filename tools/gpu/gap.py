"""The gap between rollout log-probs and those of training's forward, in bf16: mean, 99th percentile, largest."""

import functools

import torch

from tools.bench import common
from tools.gpu import report, run_all

SHAPE = common.Shape(layers=8, hidden=1024, ffn=2816, vocab=32_000, heads=16, groups=4)
EXPERTS = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512"
PROMPT, RESPONSE, REQUESTS = 64, 192, 64
CASES = {  # name -> (flags, whether training takes the rollout's routes, arXiv 2510.11370)
    "dense": ("", False),
    "dense, exact": ("--exact-rollout", False),
    "experts": (f"{EXPERTS} --moe-grouped-gemm", False),
    "experts, replayed": (f"{EXPERTS} --moe-grouped-gemm", True),
    "experts, replayed, exact": (f"{EXPERTS} --exact-rollout", True),
}


def gaps(flags: str, is_replayed: bool = False) -> torch.Tensor:
    """|rollout − training| of each token of responses to ragged prompts, [tokens] fp32 in nats."""
    from megarl.algorithms.sampling_settings import SamplingSettings
    from megarl.mcore import device
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, pg_collection, _ = common.build(SHAPE, (PROMPT, RESPONSE), f"--bf16 {flags}", "rl")
    engine = RolloutEngine(model, pg_collection, SHAPE.vocab, PROMPT + RESPONSE, 0.5, REQUESTS)
    prompts = common.random_prompts([1 + number * 37 % PROMPT for number in range(REQUESTS)], SHAPE.vocab)
    requests = [GenerationRequest(prompt, key, RESPONSE) for key, prompt in enumerate(prompts)]
    completions = engine.generate(requests, (), SamplingSettings(), is_replayed)
    rows = [prompt + completion.tokens for prompt, completion in zip(prompts, completions, strict=True)]
    lengths, tokens = torch.tensor([len(row) for row in rows]), torch.tensor(sum(rows, [])).to(device.device())
    routing = routing_of(engine, pg_collection, lengths, completions) if is_replayed else None
    with inference_mode(model):
        scored = token_scores(model, tokens, lengths, 1.0, SHAPE.vocab, routing)
    scores = scored.logprobs.cpu().split(lengths.tolist())
    pairs = zip(scores, prompts, completions, strict=True)
    return torch.cat([(row[len(prompt) :] - torch.tensor(found.logprobs)).abs() for row, prompt, found in pairs])


def routing_of(engine, pg_collection, lengths: torch.Tensor, completions: list):
    """The routes that the rollout has taken, for the forward pass over the same sequences of `lengths` [N]."""
    from megarl.mcore import device
    from megarl.mcore.attention.packing import routed_tokens
    from megarl.mcore.moe.routing import Routing

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
