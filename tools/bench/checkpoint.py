"""Checkpoints: how long the loop stands still for one, and a run with a save every step against one without.

    PYTHONPATH=. python tools/bench/checkpoint.py [--layers 8] [--hidden 512] [--steps 5] [--rounds 3] [--folder DIR]

One rank trains a policy with AdamW in fp32 (weights and two moments are saved) on random tokens. Three kinds of steps
take turns, so that a noisy machine meets all alike: without a save, with a synchronous one, and with an asynchronous
one. `stall` is the time that the loop spends in save and poll, as a fraction of that of a synchronous save; the thread
of an asynchronous save shares the cores with the step after it, which the time of whole steps shows.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

from megarl import arguments
from megarl.batch import Batch
from megarl.checkpoint.writer import CheckpointWriter
from megarl.comm import microbatches as mb
from megarl.comm import role_mesh
from megarl.mcore.model import forward_pass
from megarl.roles.trainable_model import TrainableModel
from tools.bench import common

KINDS = ("none", "sync", "async")
LENGTH = 128  # tokens of a sequence


def trainable(shape: common.Shape):
    """(mesh, trainable model) of a policy on one rank."""
    half = str(LENGTH // 2)
    flags = [*shape.flags(), "--max-prompt-length", half, "--max-response-length", half, "--lr", "1e-5"]
    roles = arguments.parse(flags, 1, "sft").roles
    mesh = role_mesh.create_mesh(roles, timedelta(minutes=10))
    return mesh, TrainableModel(roles["actor"], mesh["actor"], shape.vocab, updates=1)


def batch_of(sequences: int, vocab: int) -> Batch:
    """Random sequences of the same length."""
    return Batch(
        sequence_ids=torch.arange(sequences),
        lengths=torch.full((sequences,), LENGTH),
        tokens=torch.randint(vocab, (sequences * LENGTH,)),
        response_mask=torch.ones(sequences * LENGTH, dtype=torch.bool),
    )


def update(model: TrainableModel, batch: Batch, vocab: int):
    """One optimizer update by the mean log-prob."""

    def forward(chunk, part):
        return forward_pass.token_scores(chunk, part.tokens, part.host_metadata.lengths, 1.0, vocab).logprobs

    def loss(logprobs, part):
        value = -logprobs.mean()
        return value, value.detach().double()

    parts = mb.role_microbatches(batch, torch.arange(len(batch)), model.role, model.role_groups)
    model.router_state.attach(batch, parts)
    model.update(parts, forward, loss)


def measure(shape: common.Shape, steps: int, rounds: int, sequences: int, folder: Path) -> dict[str, list[tuple]]:
    """(seconds of the loop in save and poll, seconds of the whole step) of each step, by kind."""
    mesh, model = trainable(shape)
    batch, found, step = batch_of(sequences, shape.vocab), {kind: [] for kind in KINDS}, 0
    update(model, batch, shape.vocab)  # allocates
    for _ in range(rounds):
        for kind in KINDS:
            writer = CheckpointWriter(folder / kind, mesh, arguments.Settings(async_save=kind == "async", keep_last=1))
            for number in range(steps + 1):
                step, begin = step + 1, time.perf_counter()
                update(model, batch, shape.vocab)
                trained = time.perf_counter()
                writer.poll(step)
                if kind != "none":
                    writer.save(step, {"actor": model.state({})}, {"program": "bench"})
                end = time.perf_counter()
                if number:  # the first save of a kind also allocates
                    found[kind].append((end - trained, end - begin))
            writer.wait()
    return found


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    options = parser.parse_args()
    shape = common.Shape(options.layers, options.hidden, options.hidden * 3, options.vocab)
    folder = Path(tempfile.mkdtemp(prefix="megarl-bench-", dir=options.folder))
    try:
        found = measure(shape, options.steps, options.rounds, options.sequences, folder)
        size = sum(path.stat().st_size for path in next((folder / "sync" / "checkpoints").glob("step_*")).iterdir())
    finally:
        shutil.rmtree(folder)
    print(f"checkpoint of {size / 1e6:.0f} MB, {len(found['none'])} steps of each kind, medians")
    print("| save | loop stands still, s | whole step, s |\n|---|---|---|")
    medians = {kind: [statistics.median(column) for column in zip(*found[kind], strict=True)] for kind in KINDS}
    for kind, (stall, whole) in medians.items():
        print(f"| {kind} | {stall:.4f} | {whole:.4f} |")
    ratios = [medians["async"][i] / medians["sync"][i] for i in (0, 1)]
    print(f"stall, async / sync: {ratios[0]:.3f}; whole step, async / sync: {ratios[1]:.3f}, "
          f"async / none: {medians['async'][1] / medians['none'][1]:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
