"""Decode steps and scores of a model whose queries choose keys against the same model with dense latent attention.

    PYTHONPATH=. python tools/bench/choosing_step.py [--tokens 8192] [--short 448] [--keys 512] [--steps 16]
        [--hidden 1024] [--heads 64] [--json FILE] [--markdown]

One layer with latents and heads of DeepSeek-V3.2's sizes, and half as many heads of the indexer. A side scores a
sequence and continues it as a request alone, of `--tokens`, more than a query chooses, and of `--short`, fewer. Process
time counts, which programs beside it hardly change. `ratio` is dense over choosing: above 1, choosing is faster.
"""

import argparse
import json
import statistics
import time

import torch

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.model import forward_pass
from tools.bench import common
from tools.bench.tables import add_output_flags, whole_table

VOCAB = 512
LATENTS = "--multi-latent-attention --qk-layernorm --q-lora-rank 512 --kv-lora-rank 512 --qk-head-dim 128"
LATENTS += " --qk-pos-emb-head-dim 64 --v-head-dim 128"
SIDES = {
    "dense": "",
    "choosing": "--dsa-indexer-topk {keys} --dsa-indexer-n-heads {indexers} --dsa-indexer-head-dim 128",
}
HEADER = ["tokens", "what", "dense", "choosing", "ratio"]


def model_of(flags: str, args: argparse.Namespace):
    """(a new model, its process groups)."""
    shape = common.Shape(
        layers=1, hidden=args.hidden, ffn=2 * args.hidden, vocab=VOCAB, heads=args.heads, groups=args.heads
    )
    flags = f"{LATENTS} {flags.format(keys=args.keys, indexers=args.heads // 2)}"
    chunk, groups, _ = common.build(shape, (args.tokens, args.steps + 1), flags)
    return chunk, groups


@torch.no_grad()
def score(model, groups, tokens: list[int], steps: int) -> list[float]:
    """Process seconds of some scoring passes; one of a long sequence."""
    row, times = torch.tensor(tokens), []
    for _ in range(steps if len(tokens) < 2048 else 1):
        before = time.process_time()
        forward_pass.token_scores(model, row, torch.tensor([len(row)]), 1.0, VOCAB)
        times.append(time.process_time() - before)
    return times


def decode(model, groups, tokens: list[int], steps: int) -> list[float]:
    """Process seconds of the decode steps after the prompt."""
    engine = RolloutEngine(model, groups, VOCAB, len(tokens) + steps + 1, 0.1, 1)
    step, times = engine.engine.step_modern, []

    def timed():
        before, is_prefill = time.process_time(), bool(engine.engine.waiting_request_ids)
        found = step()
        if not is_prefill and not engine.context.num_prefill_requests:
            times.append(time.process_time() - before)
        return found

    engine.engine.step_modern = timed
    engine.generate([GenerationRequest(tokens, 0, steps + 1)], (), SamplingSettings())
    return times[2:-1]  # without the first, which makes tables, and the last, which ends the request


def measure(args: argparse.Namespace) -> list[dict]:
    """One row of seconds by side for each length and measured operation."""
    models, found = {name: model_of(flags, args) for name, flags in SIDES.items()}, []
    for length in (args.short, args.tokens):
        (tokens,) = common.random_prompts([length], VOCAB)
        for what, run in (("scores", score), ("decode step", decode)):
            seconds = {name: run(*model, tokens, args.steps) for name, model in models.items()}
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            ratio = medians["dense"] / medians["choosing"]
            found.append({"tokens": length, "what": what, "seconds": seconds, "ratio": ratio})
    return found


def table(found: list[dict], markdown: bool) -> str:
    """One line per length and operation, with milliseconds."""
    lines = [HEADER]
    for row in found:
        middle = [f"{1e3 * statistics.median(row['seconds'][name]):.1f}" for name in SIDES]
        lines.append([str(row["tokens"]), row["what"], *middle, f"{row['ratio']:.2f}"])
    return whole_table(lines, markdown, 12)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the flags."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    sizes = {"tokens": 8192, "short": 448, "keys": 512, "steps": 16, "hidden": 1024, "heads": 64}
    for name, default in sizes.items():
        made.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    add_output_flags(made)
    args = made.parse_args(argv)
    if not 1 < args.short < args.keys < args.tokens or args.steps < 4:
        made.error(f"--short {args.short} --keys {args.keys} --tokens {args.tokens} --steps {args.steps}: allowed are "
                   "ascending numbers above 1, and 4 steps or more")  # fmt: skip
    return args


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    args = parse(argv)
    found = measure(args)
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
