"""A decode step of the engine against the operators that it needs at least, called in sequence.

    PYTHONPATH=. python tools/bench/operators.py [--rounds 3] [--json FILE]

The model and the requests of `rollout.py --case plain`. `engine` is the median step of a call that generates 64 tokens
per request, without the prefill. `operators` runs blocked matrix products with weights, norms, the gathering of keys
and values, attention, SwiGLU and the softmax for sampling, on tensors of the sizes of the middle step; no rotary
positions, KV cache writes, sampling or bookkeeping. Their fraction of the engine's step shows how much a better engine
could gain with the same operators.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.kernels import linear
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.swiglu import swiglu
from tools.bench import common, rollout


def engine_step(engine: RolloutEngine, case: rollout.Case) -> float:
    """Median seconds of a step in a call of the engine."""
    ends, step = [], engine.engine.step_modern

    def timed():
        result = step()
        ends.append(time.perf_counter())
        return result

    engine.engine.step_modern = timed
    engine.generate(case.requests(), rollout.NO_END, SamplingSettings())
    engine.engine.step_modern = step
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


class Operators:
    """The operators of a decode step with a model's weights."""

    def __init__(self, chunk, shape: common.Shape, case: rollout.Case):
        self.chunk, self.count = chunk, len(case.new_tokens)
        self.groups, self.channels = shape.groups, shape.hidden // shape.heads
        keys = case.longest - max(case.new_tokens) // 2
        pages = self.count * -(-keys // 16)
        self.caches = torch.randn(shape.layers, pages + 1, 16, shape.groups, 2, self.channels)
        self.pages, self.scratch = torch.randperm(pages), torch.empty(pages, self.caches[0, 0].numel())
        self.query = torch.randn(self.count, shape.groups, MIN_ROWS, self.channels)
        self.heads, self.tokens = shape.heads // shape.groups, torch.randn(self.count, 1, shape.hidden)
        self.mask = torch.zeros(self.count, 1, 1, pages // self.count * 16)

    def step(self):
        """Runs all layers and the head on meaningless inputs."""
        x = self.tokens
        for layer, cache in zip(self.chunk.decoder.layers, self.caches, strict=True):
            attention, mlp = layer.self_attention, layer.mlp
            linear.matmul(layer.input_layernorm(x), attention.linear_qkv.weight)
            torch.index_select(cache.flatten(1), 0, self.pages, out=self.scratch)
            keys_values = self.scratch.view(self.count, -1, self.groups, 2, self.channels).transpose(1, 2)
            attended = sdpa(self.query, *keys_values.unbind(3), self.mask)[:, :, : self.heads].reshape(
                self.count, 1, -1
            )
            x = linear.matmul(attended, attention.linear_proj.weight).add_(x)
            wide = linear.matmul(layer.pre_mlp_layernorm(x), mlp.linear_fc1.weight)
            x = linear.matmul(swiglu(wide), mlp.linear_fc2.weight).add_(x)
        logits = linear.matmul(self.chunk.decoder.final_layernorm(x), self.chunk.output_layer.weight)
        return (logits - logits.amax(-1, keepdim=True)).exp_().sum(-1)

    @torch.no_grad()
    def median(self, steps: int) -> float:
        """Median seconds of some steps."""
        seconds = []
        with linear.prepacked_weights(self.chunk):
            for _ in range(steps):
                started = time.perf_counter()
                self.step()
                seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)


def measure(rounds: int, shape: common.Shape, case: rollout.Case) -> dict:
    """Medians of both sides in seconds, alternating, and the operators' fraction, without the first round."""
    chunk, pg_collection, _ = common.build(shape, (max(map(len, case.prompts)), max(case.new_tokens)))
    engine = RolloutEngine(chunk, pg_collection, shape.vocab, case.longest, rollout.buffer_gb(case), len(case.prompts))
    sides = {"engine": lambda: engine_step(engine, case), "operators": lambda: Operators(chunk, shape, case).median(32)}
    seconds = common.alternate(sides, rounds + 1)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    share = medians["operators"] / medians["engine"]
    return {"threads": torch.get_num_threads(), "seconds": seconds, "medians": medians, "share": share}


def main():
    """Parses flags, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    args = parser.parse_args()
    found = measure(args.rounds, rollout.SHAPE, rollout.CASES["plain"]())
    for name, seconds in found["medians"].items():
        print(f"{name}: {1e3 * seconds:.1f} ms per step (median of {args.rounds})")
    print(f"operators alone: {found['share']:.2f} of the engine's step")
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
