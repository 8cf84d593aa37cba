"""A decode step of a layer with decays by channel (Kimi delta attention) against a gated delta net's of equal state.

    PYTHONPATH=. python tools/bench/recurrent_step.py [--requests 1,4,16] [--hidden 2304] [--heads 32] [--channels 128]
        [--rounds 20] [--json FILE] [--markdown]

The layers alone, without norms and MLPs, on random inputs: `latents` has decays and gates from latents (Kimi-Linear),
`bounded` from hidden states (Ling 3). The sides run in turns in one process, and their process time counts, which
programs beside them hardly change. `ratio` is a side over the gated delta net: above 1, it is slower.
"""

import argparse
import contextlib
import json
import statistics
import time
from types import SimpleNamespace

import torch

from megarl.mcore.kernels import linear
from megarl.mcore.model.recurrent_mixer import GatedDeltaNet
from megarl.mcore.recurrence.runs import Runs, States
from tools.bench import common
from tools.bench.tables import add_output_flags, whole_table

TAPS = 4
NET = "gated delta net"
SIDES = {
    NET: "",
    "latents": "--linear-channel-decay --linear-gate-rank {channels}",
    "bounded": "--linear-channel-decay --linear-decay-bound -5",
}
HEADER = ["requests", "side", "ms of a step", "ratio"]


def model_of(flags: str, args: argparse.Namespace) -> torch.nn.Module:
    """A new model whose first layer has these heads."""
    sizes = f"--linear-num-key-heads {args.heads} --linear-num-value-heads {args.heads}"
    sizes += f" --linear-key-head-dim {args.channels} --linear-value-head-dim {args.channels}"
    what = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
    shape = common.Shape(layers=2, hidden=args.hidden, ffn=64, vocab=64)
    chunk, *_ = common.build(shape, (8, 8), f"{what} {sizes} {flags.format(channels=args.channels)}")
    return chunk


def plan_of(layer: GatedDeltaNet, requests: int) -> SimpleNamespace:
    """What a decode step of so many requests tells the layer."""
    states = States(*map(torch.zeros, States.shapes(requests, TAPS, layer.sizes)))
    runs = Runs(torch.tensor([[i, 1, i, i] for i in range(requests)]), 0, TAPS)
    return SimpleNamespace(runs=runs, states={layer._layer: states}, drafted=None)


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[dict]:
    """Median process seconds of a step for each number of requests and each side."""
    models, found = {name: model_of(flags, args) for name, flags in SIDES.items()}, []
    layers = {name: model.decoder.layers[0].self_attention for name, model in models.items()}
    with contextlib.ExitStack() as stack:
        for model in models.values():
            stack.enter_context(linear.prepacked_weights(model))
        for requests in args.requests:
            hidden = torch.randn(requests, 1, args.hidden)
            plans = {name: plan_of(layer, requests) for name, layer in layers.items()}

            def once(name: str, hidden=hidden, plans=plans) -> float:
                before = time.process_time()
                layers[name].step(hidden, plans[name])
                return time.process_time() - before

            sides = {name: lambda name=name: once(name) for name in layers}
            seconds = {name: times[1:] for name, times in common.alternate(sides, args.rounds + 1).items()}
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            found += [
                {"requests": requests, "side": name, "seconds": seconds[name], "ratio": medians[name] / medians[NET]}
                for name in layers
            ]
    return found


def table(found: list[dict], markdown: bool) -> str:
    """One line per number of requests and side."""
    lines = [HEADER]
    for row in found:
        middle = f"{1e3 * statistics.median(row['seconds']):.2f}"
        lines.append([str(row["requests"]), row["side"], middle, f"{row['ratio']:.2f}"])
    return whole_table(lines, markdown, 16)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the flags."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("--requests", default="1,4,16", help="numbers of requests; default: %(default)s")
    for name, default in (("hidden", 2304), ("heads", 32), ("channels", 128), ("rounds", 20)):
        made.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    add_output_flags(made)
    args = made.parse_args(argv)
    numbers = args.requests.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers) or args.rounds < 1:
        made.error(f"--requests {args.requests} --rounds {args.rounds}: allowed are whole numbers above 0")
    args.requests = [int(number) for number in numbers]
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
