"""Products with weights and their gradients at the sizes of `step.py` and `logprob.py`: compiled kernels against BLAS.

    PYTHONPATH=. python tools/bench/products.py [--rounds 9] [--json FILE]

One thread; both sides alternate, and the fastest round in seconds of CPU counts, so that other programs on the machine
disturb little. `ratio`: the time of BLAS divided by that of the compiled kernel.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from megarl.mcore.kernels import native
from megarl.mcore.kernels.linear import weight_gradient
from tools.bench import common

SIZES = {  # rows, K, N
    "qkv": (2048, 256, 512), "proj": (2048, 256, 256), "fc1": (2048, 256, 1536), "fc2": (2048, 768, 256),
    "head": (2048, 256, 4096), "chunk of a large head": (131, 256, 32_000),
}  # fmt: skip


def sides(rows: int, inner: int, columns: int) -> dict:
    """Kind of product -> (compiled kernel, BLAS), functions without arguments."""
    x, weight, grad = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
    return {
        "forward": (lambda: native.ops.linear(x, weight, None, None), lambda: x @ weight.t()),
        "input gradient": (lambda: native.ops.linear(grad, weight.t(), None, None), lambda: grad @ weight),
        "weight gradient": (lambda: weight_gradient(grad, x), lambda: grad.t() @ x),
    }


def fastest(works: tuple, rounds: int) -> list[float]:
    """Least seconds of CPU of each function; every round calls all."""
    found = [float("inf")] * len(works)
    for number in range(rounds + 1):
        for i, work in enumerate(works):
            start = time.thread_time()
            work()
            if number:  # the first round warms up
                found[i] = min(found[i], time.thread_time() - start)
    return found


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each side; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    args = common.parsed(parser, argv)
    if not native.is_built():
        raise common.Unusable(native.absence() or "no compiled kernels with CUDA")
    torch.set_num_threads(1)
    found = []
    for name, (rows, inner, columns) in SIZES.items():
        for kind, works in sides(rows, inner, columns).items():
            speeds = [2e-9 * rows * inner * columns / seconds for seconds in fastest(works, args.rounds)]
            found.append({"size": name, "kind": kind, "gflops": dict(zip(("compiled", "blas"), speeds, strict=True))})
            ratio = speeds[0] / speeds[1]
            print(f"{name:24}{kind:18}{speeds[0]:8.1f} and{speeds[1]:7.1f} GFLOP/s   ratio {ratio:.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
