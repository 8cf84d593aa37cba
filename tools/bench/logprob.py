"""Log-probs of given tokens: seconds and peak memory of megarl's packed forward against Hugging Face's padded one.

    PYTHONPATH=. python tools/bench/logprob.py --case plain|gradient|ragged [--rounds 5] [--json FILE] [--markdown]

4 layers, hidden 256, vocabulary 32,000, fp32. plain: 16 sequences of 128 tokens without gradients, as for the
old policy and the reference. gradient: the same with the backward pass of their mean, as in an update. ragged: like
gradient with log-normal lengths (median 32, one of 256).

megarl: packed sequences and a head that never holds all logits; it also computes the entropy. hf-softmax,
hf-cross-entropy: Hugging Face's forward on the padded batch to all logits, then torch's log_softmax with gather, or its
cross-entropy. A side's peak is measured above the memory before the work, in its own process: allocated bytes on CUDA,
otherwise Linux's resident memory.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megarl.mcore import device
from megarl.mcore.model import forward_pass
from tools.bench import common
from tools.bench.head_memory import ENVIRONMENT, measured

SHAPE = common.Shape(layers=4, hidden=256, ffn=768, vocab=32_000)
PEERS = {"hf-softmax": "transformers", "hf-cross-entropy": "transformers"}


@dataclass(frozen=True)
class Case:
    """Lengths of the sequences, and whether gradients are computed."""

    lengths: list[int]
    gradient: bool

    def sequences(self) -> list[Tensor]:
        """Random tokens."""
        return [torch.tensor(row, device=device.device()) for row in common.random_prompts(self.lengths, SHAPE.vocab)]


CASES = {
    "plain": lambda: Case([128] * 16, False),
    "gradient": lambda: Case([128] * 16, True),
    "ragged": lambda: Case(common.log_normal_lengths(32, 256, 0.8).tolist(), True),
}


def megarl_side(chunk, rows: list[Tensor]) -> Tensor:
    """Log-probs of all tokens except the first of each sequence, concatenated."""
    lengths = torch.tensor([len(row) for row in rows])
    scores = forward_pass.token_scores(chunk, torch.cat(rows), lengths.cpu(), 1.0, SHAPE.vocab)
    return torch.cat([logprobs[1:] for logprobs in scores.logprobs.split(lengths.tolist())])


def _padded_logits(peer, rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [N, L − 1, V], targets [N, L − 1], which of them are real)."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    full = bool(real.all())  # without padding no mask is needed, and SDPA uses its causal kernel
    logits = peer(ids, attention_mask=None if full else real, use_cache=False).logits
    return logits[:, :-1], ids[:, 1:], real[:, 1:].bool()


def softmax_side(peer, rows: list[Tensor]) -> Tensor:
    """The same log-probs by log_softmax of all logits."""
    logits, targets, real = _padded_logits(peer, rows)
    return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)[real]


def cross_entropy_side(peer, rows: list[Tensor]) -> Tensor:
    """The same log-probs by torch's cross-entropy."""
    logits, targets, real = _padded_logits(peer, rows)
    return -cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(real)[real]


def once(work, module, gradient: bool) -> float:
    """The mean of `work()`'s log-probs; with `gradient`, also computes and discards its gradients."""
    module.train(gradient)
    with torch.set_grad_enabled(gradient):
        mean = work().mean()
    if gradient:
        mean.backward()
        module.zero_grad(set_to_none=True)
    return float(mean.detach())


def sides_of(case: Case, names: list[str]) -> dict:
    """Side -> function without arguments that does the work once and returns the mean of the log-probs."""
    longest = max(case.lengths)
    chunk, _, args = common.build(SHAPE, (longest, longest))
    peer, rows = common.export(chunk, SHAPE, args, longest), case.sequences()
    work = {
        common.OURS: (lambda: megarl_side(chunk, rows), chunk),
        "hf-softmax": (lambda: softmax_side(peer, rows), peer),
        "hf-cross-entropy": (lambda: cross_entropy_side(peer, rows), peer),
    }
    return {name: lambda side=work[name]: once(*side, case.gradient) for name in names}


def timed(work) -> float:
    """Seconds of a call, which reads its result and so waits for the device."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak_of(side: str, case: str) -> int:
    """Peak bytes of one side, measured in its own process."""
    command = [sys.executable, __file__, "--case", case, "--side", side]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise common.Unusable(f"{side} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, rounds: int, peers: list[str]) -> dict:
    """Times the sides alternately, then measures the peak of each."""
    case = CASES[name]()
    sides = sides_of(case, [common.OURS, *peers])
    means = {side: work() for side, work in sides.items()}  # warm-up: libraries, threads
    for mean in means.values():
        common.refuse_different(abs(mean - means[common.OURS]))
    seconds = common.alternate({side: lambda work=work: timed(work) for side, work in sides.items()}, rounds)
    peaks = {side: peak_of(side, name) for side in sides}
    return common.report(name, seconds, {"tokens": sum(case.lengths)}, peak_bytes=peaks)


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    made = common.parser(__doc__, CASES, rounds=5)
    made.add_argument("--side", choices=[common.OURS, *PEERS], help=argparse.SUPPRESS)
    args = common.parsed(made, argv)
    peers = common.installed(PEERS)
    if args.side:
        work = sides_of(CASES[args.case](), [args.side])[args.side]
        work()
        print(measured(work)[0])
        return
    found = measure(args.case, args.rounds, peers)
    common.publish(found, args, SHAPE)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
