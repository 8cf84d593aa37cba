"""bf16 against fp32: seconds of a rollout, of log-probs and of an update, with the same work in both.

    PYTHONPATH=. python tools/bench/precision.py [--case rollout|scores|update] [--rounds 5] [--json FILE] [--markdown]

6 layers, hidden 512, vocabulary 32,000, random weights. rollout: 32 prompts of 16–22 tokens, 64 new tokens each, no end
token. scores: log-probs of 32 sequences of 83 tokens without gradients. update: forward, backward and Adam on them;
bf16 has fp32 master weights, moments and gradients (`--bf16`). Sides alternate after a short warm-up call of each.
`ratio`: the time of fp32 over that of bf16.
"""

import time
from datetime import timedelta

import torch

from megarl import arguments
from megarl.algorithms.token_sampling import SamplingSettings
from megarl.batch import Batch
from megarl.comm import role_mesh
from megarl.mcore import device
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.model import forward_pass
from megarl.roles.trainable_model import TrainableModel
from tools.bench import common

SHAPE = common.Shape(layers=6, hidden=512, ffn=1536, vocab=32_000)
PROMPTS, NEW, LENGTH = [16 + i % 7 for i in range(32)], 64, 83
SIDES = {"fp32": "", "bf16": "--bf16"}
NO_END = ()  # no token ends a response
FLAGS = f"--max-prompt-length 22 --max-response-length {NEW} --lr 1e-5 --max-tokens-per-microbatch 1400"


def build_models(shape: common.Shape) -> dict[str, TrainableModel]:
    """A trainable model of each precision, on one rank; joins a world of one rank."""
    models, role_groups = {}, None
    for name, flags in SIDES.items():
        roles = arguments.parse([*shape.flags(), *FLAGS.split(), *flags.split()], 1, "sft").roles
        role_groups = role_groups or role_mesh.create_mesh(roles, timedelta(minutes=10))["actor"]
        models[name] = TrainableModel(roles["actor"], role_groups, shape.vocab, updates=1)
    return models


def rollouts(trainable_model: TrainableModel, vocab: int):
    """A function that generates responses to the prompts, of `new` tokens each."""
    gigabytes = 0.2 * trainable_model.model[0].config.params_dtype.itemsize / 4
    engine = RolloutEngine(
        trainable_model.model[0],
        trainable_model.role_groups.pg_collection,
        vocab,
        max(PROMPTS) + NEW,
        gigabytes,
        len(PROMPTS),
    )
    prompts = common.random_prompts(PROMPTS, vocab)

    def generate(new: int = NEW):
        requests = [GenerationRequest(prompt, key, new) for key, prompt in enumerate(prompts)]
        return engine.generate(requests, NO_END, SamplingSettings())

    return generate


def scoring(trainable_model: TrainableModel, vocab: int, trains: bool):
    """A function that scores, or trains on, the first `count` sequences and returns the micro-batches' results."""
    generator, mask = torch.Generator().manual_seed(1), torch.ones(len(PROMPTS), LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    batch = Batch(
        sequence_ids=torch.arange(len(PROMPTS)), lengths=torch.full((len(PROMPTS),), LENGTH),
        tokens=torch.randint(vocab, (mask.numel(),), generator=generator), response_mask=mask.flatten(),
    ).to(device.device())  # fmt: skip

    def forward(chunk, microbatch):
        lengths, response_mask = microbatch.host_metadata.lengths, microbatch.host_metadata.response_mask
        return forward_pass.token_scores(chunk, microbatch.tokens, lengths, 1.0, vocab, None, response_mask)

    def loss(scores, microbatch):
        return -scores.logprobs.sum() / mask.sum().item(), scores.logprobs.detach()

    def run(count: int = len(PROMPTS)):
        microbatches = trainable_model.microbatches(batch, torch.arange(count))
        if trains:
            return trainable_model.update(microbatches, forward, loss)[0]
        return trainable_model.forward_only(microbatches, forward)

    return run


CASES = {
    "rollout": (rollouts, len(PROMPTS) * NEW),
    "scores": (lambda *model: scoring(*model, trains=False), len(PROMPTS) * LENGTH),
    "update": (lambda *model: scoring(*model, trains=True), len(PROMPTS) * LENGTH),
}


def seconds_of(work) -> float:
    """Seconds of a call, including its work on the device."""
    started = time.perf_counter()
    work()
    if device.has_cuda():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(case: str, rounds: int, shape: common.Shape = SHAPE) -> dict:
    """Times both sides alternately; `common.report` with the ratio of fp32 to bf16."""
    make, tokens = CASES[case]
    work = {name: make(trainable_model, shape.vocab) for name, trainable_model in build_models(shape).items()}
    for run in work.values():
        run(4)
    seconds = common.alternate({name: lambda run=run: seconds_of(run) for name, run in work.items()}, rounds)
    return common.report(case, seconds, {"tokens": tokens}, ours="bf16")


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    args = common.parsed(common.parser(__doc__, CASES, rounds=5), argv)
    common.publish(measure(args.case, args.rounds), args, SHAPE)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
