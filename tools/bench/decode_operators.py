"""Counts the operators of the engine's decode step and the share of its time that is not a product with weights.

    PYTHONPATH=. python tools/bench/decode_operators.py [--requests 4,16,64] [--layers 4] [--hidden 256] [--ffn 768]
        [--vocab 4096] [--rounds 5] [--top 12] [--json FILE] [--markdown]

`per step`: operators that Python calls in a decode step, from torch's profiler; an operator inside another one is not
counted, so that a fused kernel is one. `per layer`: the difference of two models of different depth, divided by the
difference of their layers. Both are means over `STEPS` decode steps, after the prefill. `time` is the median step
without a profiler. `products` is the time of the step's products with weights alone, called in sequence on as many
rows, with the weights prepacked as in the engine; `outside` is the share of the step that is left. --top prints the
operators with the most time under the profiler at each number of requests, which slows each operator by about 1 µs.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, replace

import torch
from torch.profiler import ProfilerActivity, profile

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.kernels import linear
from tools.bench import common, rollout
from tools.bench.tables import add_output_flags, whole_table

SKIPPED, STEPS = 3, 16  # steps of a call before those that count: prefill, and the first decodes; steps that count
NEW_TOKENS = SKIPPED + STEPS + 3
HEADER = ["requests", "rows", "per layer", "per step", "time", "products", "outside"]


class StepWatch:
    """Watches the counted decode steps of one call of an engine: calls `begin` and `end` around them."""

    def __init__(self, engine: RolloutEngine, case: rollout.Case):
        self.engine, self.case, self.rows = engine, case, 0

    def run(self, begin, end):
        """Generates; `begin` is called before each counted step, `end` after it."""
        inner, number, original = self.engine.engine, 0, self.engine.engine.step_modern

        def watched():
            nonlocal number
            number += 1
            counts = SKIPPED < number <= SKIPPED + STEPS
            if counts:
                begin()
            result = original()
            if counts:
                end()
                self.rows = self.engine.context.padded_active_token_count
            return result

        inner.step_modern = watched
        try:
            self.engine.generate(self.case.requests(), rollout.NO_END, SamplingSettings())
        finally:
            inner.step_modern = original

    def seconds(self) -> float:
        """Median seconds of a step."""
        begins, ends = [], []
        self.run(lambda: begins.append(time.perf_counter()), lambda: ends.append(time.perf_counter()))
        return statistics.median(end - begin for begin, end in zip(begins, ends, strict=True))

    def operators(self) -> tuple[Counter, Counter]:
        """Calls and microseconds of each operator that Python calls, in all counted steps together."""
        calls, microseconds, profiler = Counter(), Counter(), profile(activities=[ProfilerActivity.CPU])
        passed = iter(range(STEPS))

        def stop():
            if next(passed) == STEPS - 1:
                profiler.stop()

        started = []
        self.run(lambda: started or started.append(profiler.start()), stop)
        for event in profiler.events():
            if event.cpu_parent is None:
                calls[event.name] += 1
                microseconds[event.name] += event.cpu_time_total
        return calls, microseconds


def weights_of(chunk) -> list[torch.Tensor]:
    """The weights of a dense model's products in a decode step."""
    layers = chunk.decoder.layers
    inner = [(x.self_attention.linear_qkv, x.self_attention.linear_proj, x.mlp.linear_fc1, x.mlp.linear_fc2)
             for x in layers]  # fmt: skip
    return [module.weight for modules in inner for module in modules] + [chunk.output_layer.weight]


@torch.no_grad()
def products_seconds(chunk, rows: int) -> float:
    """Median seconds of a step's products with weights, alone."""
    weights, seconds = weights_of(chunk), []
    inputs = {weight.shape[1]: torch.randn(rows, 1, weight.shape[1]) for weight in weights}
    with linear.prepacked_weights(chunk):
        for _ in range(SKIPPED + STEPS):
            started = time.perf_counter()
            for weight in weights:
                linear.matmul(inputs[weight.shape[1]], weight)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[SKIPPED:])


def count(engines: tuple[RolloutEngine, RolloutEngine], case: rollout.Case) -> dict:
    """Operators per step of the deeper engine's model, per layer, and by name; the other one has fewer layers."""
    (calls, microseconds), (fewer, _) = (StepWatch(engine, case).operators() for engine in engines)
    deep, shallow = (len(engine.model.decoder.layers) for engine in engines)
    per_layer = (calls.total() - fewer.total()) / STEPS / (deep - shallow)
    names = [[name, calls[name] / STEPS, spent / STEPS] for name, spent in microseconds.most_common()]
    return {"per_layer": per_layer, "per_step": calls.total() / STEPS, "operators": names}


def engine_of(shape: common.Shape, case: rollout.Case) -> RolloutEngine:
    """An engine with a new model with room for the requests of the case."""
    longest = max(map(len, case.prompts))
    chunk, pg_collection, _ = common.build(shape, (longest, NEW_TOKENS))
    gigabytes = rollout.buffer_gb(case, shape)
    return RolloutEngine(chunk, pg_collection, shape.vocab, case.longest, gigabytes, len(case.prompts))


def case_of(requests: int, vocab: int) -> rollout.Case:
    """Requests with short prompts, whose responses are long enough for the counted steps."""
    prompts = common.random_prompts([16 + i % 7 for i in range(requests)], vocab)
    return rollout.Case(prompts, 1, [NEW_TOKENS] * requests)


def measure(shape: common.Shape, requests: list[int], rounds: int) -> list[dict]:
    """Counts and times of a decode step for each number of requests; times are medians of the rounds but the first."""
    largest = case_of(max(requests), shape.vocab)
    engines = engine_of(shape, largest), engine_of(replace(shape, layers=shape.layers // 2), largest)
    found = []
    for number in requests:
        watch = StepWatch(engines[0], case_of(number, shape.vocab))
        sides = {"step": watch.seconds, "products": lambda w=watch: products_seconds(w.engine.model, w.rows)}
        seconds = {name: times[1:] for name, times in common.alternate(sides, rounds + 1).items()}
        step, products = (statistics.median(seconds[name]) for name in sides)
        found.append({
            "requests": number, "rows": watch.rows, "step_s": step, "products_s": products,
            "outside": 1 - products / step, "seconds": seconds, **count(engines, watch.case),
        })  # fmt: skip
    return found


def table(found: list[dict], markdown: bool) -> str:
    """One line per number of requests."""
    lines = [HEADER]
    for row in found:
        times = [f"{1e3 * row[name]:.2f} ms" for name in ("step_s", "products_s")]
        counts = [f"{row[name]:.1f}" for name in ("per_layer", "per_step")]
        lines.append([str(row["requests"]), str(row["rows"]), *counts, *times, f"{row['outside']:.0%}"])
    return whole_table(lines, markdown, 12)


def names_table(row: dict, top: int, markdown: bool) -> str:
    """The operators with the most time per step at one number of requests."""
    lines = [["operator", "calls", "time"]]
    lines += [[name, f"{calls:.1f}", f"{spent:.0f} µs"] for name, calls, spent in row["operators"][:top]]
    return f"\n{row['requests']} requests, the operators with most time in a step:\n" + whole_table(lines, markdown, 32)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the flags."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("--requests", default="4,16,64", help="numbers of requests; default: %(default)s")
    for name, default in (("layers", 4), ("hidden", 256), ("ffn", 768), ("vocab", 4096)):
        made.add_argument(f"--{name}", type=int, default=default, help="of the model; default: %(default)s")
    made.add_argument("--rounds", type=int, default=5, help="rounds of the times; default: %(default)s")
    made.add_argument("--top", type=int, default=12, help="operators listed by name; default: %(default)s")
    add_output_flags(made)
    args = made.parse_args(argv)
    numbers = args.requests.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        made.error(f"--requests {args.requests}: allowed are whole numbers above 0, separated by commas")
    args.requests = [int(number) for number in numbers]
    if args.layers < 2 or args.rounds < 1:
        made.error(f"--layers {args.layers} --rounds {args.rounds}: allowed are at least 2 layers and 1 round")
    return args


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    args = parse(argv)
    shape = common.Shape(args.layers, args.hidden, args.ffn, args.vocab)
    found = measure(shape, args.requests, args.rounds)
    print(table(found, args.markdown))
    if args.top > 0:
        print(*(names_table(row, args.top, args.markdown) for row in found), sep="\n")
    if args.json:
        facts = {"model": asdict(shape), "threads": torch.get_num_threads(), "steps": found}
        args.json.write_text(json.dumps(facts, indent=2) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
