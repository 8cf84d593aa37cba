"""Shared prompts in training: seconds of an update that computes each prompt once, against once per response.

    PYTHONPATH=. python tools/bench/shared_prompts.py [--prompts 8] [--prompt-length 384] [--samples 16]
        [--response-length 64] [--cap 16384] [--rounds 5] [--json FILE]

Both sides pack the same sequences under the same token cap and run forward, backward and the optimizer. They alternate;
the first round is not counted. Prints medians, their ratio, and the fraction of tokens that remains with sharing.
"""

import argparse
import json
import statistics
from datetime import timedelta
from pathlib import Path

import torch

from megarl import arguments
from megarl.batch import Batch
from megarl.comm import role_mesh
from megarl.mcore import device
from megarl.roles.trainable_model import TrainableModel
from tools.bench import common
from tools.bench.packing import SHAPE, one_update

VOCAB = 4096


def batch_of(args: argparse.Namespace) -> Batch:
    """Random prompts with `samples` random responses each; the mask covers the responses."""
    generator = torch.Generator().manual_seed(1)
    count, length = args.prompts * args.samples, args.prompt_length + args.response_length
    tokens = torch.randint(VOCAB, (count, length), generator=generator)
    tokens[:, : args.prompt_length] = tokens[:: args.samples, : args.prompt_length].repeat_interleave(args.samples, 0)
    batch = Batch(
        sequence_ids=torch.arange(count),
        prompt_ids=torch.arange(count) // args.samples,
        prompt_lengths=torch.full((count,), args.prompt_length),
        lengths=torch.full((count,), length),
        tokens=tokens.flatten(),
        response_mask=(torch.arange(length) >= args.prompt_length).repeat(count),
    )
    return batch.to(device.device())


def measure(args: argparse.Namespace) -> dict:
    """Times both sides alternately; returns seconds, ratio, and the fraction of tokens that remains."""
    flags = f"{SHAPE} --max-prompt-length {args.prompt_length} --max-response-length {args.response_length}"
    role = arguments.parse(f"{flags} --max-tokens-per-microbatch {args.cap}".split(), 1, "sft").roles["actor"]
    trainable_model = TrainableModel(
        role, role_mesh.create_mesh({"actor": role}, timedelta(minutes=5))["actor"], VOCAB, updates=1
    )
    sides = {"shared": batch_of(args), "alone": batch_of(args)}
    sides["alone"].prompt_ids = None
    clocks = {side: lambda batch=batch: one_update(trainable_model, batch, VOCAB) for side, batch in sides.items()}
    seconds = common.alternate(clocks, args.rounds + 1)
    medians = {side: statistics.median(times[1:]) for side, times in seconds.items()}
    microbatches = trainable_model.microbatches(sides["shared"], torch.arange(len(sides["shared"])))
    prefixes = [microbatch.host_metadata.shared for microbatch, _ in microbatches]
    saved = sum(int(prefix.tokens.sum()) for prefix in prefixes if prefix is not None)
    return {
        "device": str(device.device()),
        "threads": torch.get_num_threads(),
        "left": 1 - saved / len(sides["shared"].tokens),
        "ratio": medians["alone"] / medians["shared"],
        "medians": medians,
        "seconds": seconds,
    }


def main():
    """Parses flags, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"prompts": 8, "prompt-length": 384, "samples": 16, "response-length": 64, "cap": 16384, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    for side, seconds in found["medians"].items():
        print(f"{side}: {seconds:.3f} s (median of {args.rounds})")
    print(f"ratio {found['ratio']:.2f}, with {found['left']:.2f} of the tokens")
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
