"""Peak memory of log-prob and entropy, forward and backward: megarl's chunked head against the naive computation.

Also that of the divergence from a teacher, in relation to the chunked head's.

    PYTHONPATH=. python tools/bench/head_memory.py --tokens 8192 --vocab 128000 --hidden 64 [--json FILE]

Naive: all logits [T, V] at once, log_softmax, gather, entropy, autograd. Each side runs in its own process, on one rank
in fp32, on the CUDA device if there is one. It measures the peak above the memory before the work, which includes the
inputs: allocated bytes on CUDA, otherwise Linux's resident memory. Prints both peaks, their ratio, and the largest
difference of values and gradients, relative to the largest value of that kind or 1, whichever is larger.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.mcore import device

# Freed buffers of a MiB or more return to the system at once, so resident memory equals allocated memory.
ENVIRONMENT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
KINDS = ("logprobs", "entropy", "to_hidden", "to_weight")


def problem(tokens: int, vocab: int, hidden: int, target: torch.device):
    """Hidden states [T, H], output weights [V, H] for logits of deviation 2, targets [T]; the same on both sides."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator).mul_(2 * hidden**-0.5)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return states.to(target).requires_grad_(), weight.to(target).requires_grad_(), targets.to(target)


def naive(hidden, weight, targets):
    """Log-probs and entropy [T] from all logits at once."""
    logp = (hidden @ weight.T).log_softmax(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def chunked(hidden, weight, targets):
    """The same from megarl's function."""
    from megarl.mcore.kernels.head import HeadOptions
    from megarl.mcore.kernels.head_scores import head_scores

    return head_scores(hidden, weight, targets, HeadOptions(1.0, len(weight), dist.group.WORLD))[:2]


def divergence(hidden, weight, targets):
    """The divergence from a teacher of the same size, in place of both scores."""
    from megarl.algorithms.kl import Divergence
    from megarl.mcore.kernels.head import HeadOptions
    from megarl.mcore.kernels.head_divergence import TeacherHead, head_divergence

    states, head = hidden.detach().roll(1, 0), weight.detach()
    teacher = TeacherHead(head, 1.0, None, Divergence("jsd"))
    options = HeadOptions(1.0, len(weight), dist.group.WORLD)
    scores = head_divergence(hidden, weight, [(None, states, teacher)], targets, options)
    return scores.divergence, scores.divergence


def forward_backward(side, hidden, weight, targets):
    """Values and gradients in the order of `KINDS`; every token has another weight in the loss."""
    row = torch.linspace(-1, 1, len(targets), device=hidden.device)
    logprobs, entropy = side(hidden, weight, targets)
    (row * logprobs + 0.5 * row.flip(0) * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


SIDES = {"naive": naive, "chunked": chunked, "divergence": divergence}


def _resident(kind: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, bytes."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def measured(work):
    """(bytes at the peak of work() above those before, seconds, its result)."""
    on_cuda = device.has_cuda()
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
    start = time.perf_counter()
    result = work()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if on_cuda else _resident("VmHWM")
    return peak - before, seconds, result


def run_side(side: str, tokens: int, vocab: int, hidden: int, out: str):
    """Measures one side in this process; writes peak, seconds and results to the file `out`."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process is killed and no other
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(device.backend(), store=store, rank=0, world_size=1)
        function = SIDES[side]
        target = device.device()
        forward_backward(function, *problem(64, 100, hidden, target))  # warm-up: libraries, thread pools
        inputs = problem(tokens, vocab, hidden, target)
        peak, seconds, results = measured(lambda: forward_backward(function, *inputs))
        results = {kind: result.cpu() for kind, result in zip(KINDS, results, strict=True)}
        torch.save({"peak": peak, "seconds": seconds, "results": results}, out)
        dist.destroy_process_group()


def compare(tokens: int, vocab: int, hidden: int) -> dict:
    """Runs both sides one after the other. CalledProcessError if one fails, e.g. naive without enough memory."""
    report = {"tokens": tokens, "vocab": vocab, "hidden": hidden, "device": device.device().type}
    sides = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            out = f"{folder}/{side}"
            sizes = ["--tokens", str(tokens), "--vocab", str(vocab), "--hidden", str(hidden)]
            command = [sys.executable, __file__, *sizes, "--side", side, "--out", out]
            subprocess.run(command, check=True, env=ENVIRONMENT)
            sides[side] = torch.load(out)
            report[f"{side}_peak_bytes"] = sides[side]["peak"]
            report[f"{side}_seconds"] = round(sides[side]["seconds"], 3)
    report["ratio"] = report["chunked_peak_bytes"] / report["naive_peak_bytes"]
    report["divergence_ratio"] = report["divergence_peak_bytes"] / report["chunked_peak_bytes"]
    for kind in KINDS:
        ours, wanted = sides["chunked"]["results"][kind], sides["naive"]["results"][kind]
        report[f"{kind}_difference"] = float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1))
    return report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=8192, help="number of tokens T; default: %(default)s")
    parser.add_argument("--vocab", type=int, default=128_000, help="vocabulary size V; default: %(default)s")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size H; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="append the result as one line")
    parser.add_argument("--side", choices=tuple(SIDES), help="measure only this side, into --out")
    parser.add_argument("--out", metavar="FILE", help="output file of --side")
    arguments = parser.parse_args(argv)
    sizes = arguments.tokens, arguments.vocab, arguments.hidden
    if min(sizes) < 1:
        parser.error(f"--tokens, --vocab and --hidden must be at least 1, not {sizes}")
    if (arguments.side is None) != (arguments.out is None):
        parser.error("--side and --out belong together")
    if arguments.side:
        run_side(arguments.side, *sizes, arguments.out)
        return 0
    report = compare(*sizes)
    for side in SIDES:
        print(f"{side:12}{report[f'{side}_peak_bytes'] / 2**20:10.1f} MiB{report[f'{side}_seconds']:9.2f} s")
    print(
        f"ratio       {report['ratio']:10.4f}, of the divergence to the chunked head {report['divergence_ratio']:.2f}"
    )
    print("largest differences: " + ", ".join(f"{kind} {report[f'{kind}_difference']:.1e}" for kind in KINDS))
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
