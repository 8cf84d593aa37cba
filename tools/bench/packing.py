"""Packed against padded training: tokens per second on log-normal lengths, the same model, sequences and updates.

    PYTHONPATH=. python tools/bench/packing.py [--sequences 64] [--max-length 512] [--rounds 5] [--json FILE]

Packed: sequences concatenated in micro-batches under the token cap, as megarl trains. Padded: every sequence as long as
the longest, in micro-batches under the same cap, as in a batch [N, L]. Both run forward, backward and the optimizer in
the same code. They alternate; the first round is not counted. Tokens exclude padding. Prints medians, their ratio, and
the padding factor (padded over real tokens), the upper limit of the ratio.
"""

import argparse
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch

from megarl import arguments
from megarl.algorithms.aggregation import token_mean
from megarl.batch import Batch
from megarl.comm import role_mesh
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.roles.trainable_model import TrainableModel
from tools.bench import common

SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4"
    " --ffn-hidden-size 768 --swiglu --normalization RMSNorm --disable-bias-linear --lr 1e-4"
)


def batch_of(lengths: torch.Tensor, vocab_size: int) -> Batch:
    """Random sequences of these lengths; the mask covers all tokens except the first of each."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    mask[lengths.cumsum(0) - lengths] = False
    batch = Batch(
        sequence_ids=torch.arange(len(lengths)),
        lengths=lengths,
        tokens=torch.randint(vocab_size, mask.shape, generator=generator),
        response_mask=mask,
    )
    return batch.to(device.device())


def one_update(trainable_model: TrainableModel, batch: Batch, vocab_size: int) -> float:
    """Seconds of one update on the batch."""
    started, count = time.perf_counter(), batch.response_mask.sum().double()

    def loss(scores, microbatch):
        value = token_mean(-scores.logprobs, microbatch.response_mask, count)
        return value, value.detach()

    def forward(chunk, microbatch):
        metadata = microbatch.host_metadata
        return forward_pass.token_scores(
            chunk, microbatch.tokens, metadata.lengths, 1.0, vocab_size,
            mask=metadata.response_mask, shared=metadata.shared,
        )  # fmt: skip

    losses, *_ = trainable_model.update(trainable_model.microbatches(batch, torch.arange(len(batch))), forward, loss)
    float(sum(losses))  # waits for the device
    return time.perf_counter() - started


def measure(args: argparse.Namespace) -> dict:
    """Times both sides alternately; returns seconds, tokens per second, ratio and padding factor."""
    flags = f"{SHAPE} --max-prompt-length {args.max_length // 2} --max-response-length {args.max_length // 2}"
    flags += f" --max-tokens-per-microbatch {args.cap}"
    role = arguments.parse(flags.split(), 1, "sft").roles["actor"]
    role_groups = role_mesh.create_mesh({"actor": role}, timedelta(minutes=5))["actor"]
    trainable_model = TrainableModel(role, role_groups, args.vocab, updates=1)
    lengths = common.log_normal_lengths(args.sequences, args.max_length, args.deviation)
    batches = {
        "packed": batch_of(lengths, args.vocab),
        "padded": batch_of(torch.full_like(lengths, args.max_length), args.vocab),
    }
    clocks = {
        side: lambda batch=batch: one_update(trainable_model, batch, args.vocab) for side, batch in batches.items()
    }
    seconds = {side: times[1:] for side, times in common.alternate(clocks, args.rounds + 1).items()}
    real = int(lengths.sum())
    speed = {side: real / statistics.median(times) for side, times in seconds.items()}
    return {
        "device": str(device.device()),
        "threads": torch.get_num_threads(),
        "sequences": args.sequences,
        "tokens": real,
        "padding_factor": args.sequences * args.max_length / real,
        "tokens_per_s": speed,
        "ratio": speed["packed"] / speed["padded"],
        "seconds": seconds,
    }


def main():
    """Parses flags, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("sequences", 64), ("max-length", 512), ("rounds", 5), ("cap", 4096), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--deviation", type=float, default=0.8, help="standard deviation of the log length; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    args = parser.parse_args()
    found = measure(args)
    print(f"{found['sequences']} sequences, {found['tokens']} tokens, longest {args.max_length}")
    for side, speed in found["tokens_per_s"].items():
        print(f"{side}: {speed:8.0f} tokens/s (median of {args.rounds})")
    print(f"ratio {found['ratio']:.2f} at padding factor {found['padding_factor']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
