"""A model of transformers (`--model-source transformers`) against Megatron's layers.

    PYTHONPATH=. python tools/bench/any_model.py --case 512x6|256x8 [--rounds 5] [--json FILE]

512x6, 256x8: a Qwen3 with random weights, in fp32. rollout: 32 requests of 16 tokens with 48 new ones; its time is that
of the decode steps and of one prefill. update: forward and backward of 32 sequences of 16 to 127 tokens; score: their
log-probs without gradients. Both sides run in turns in one process, and their process time counts, which programs
beside them hardly change. Timing starts only after the log-probs of both sides agree, and ends with an error if a
rollout's log-probs are not those of the scores, to the last bit. `step.py --granite` and `lora_step.py` measure whole
steps of such models.
"""

import argparse
import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models

from megarl import arguments
from megarl.algorithms.token_sampling import SamplingSettings
from megarl.checkpoint.pretrained import find_pretrained
from megarl.comm import role_mesh
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.model import forward_pass, gpt
from tools.bench import common

REQUESTS, PROMPT, NEW, LONGEST = 32, 16, 48, 128
OURS, MEGATRON = "transformers", "megatron"
CASES = {
    "512x6": common.Shape(layers=6, hidden=512, ffn=1408, vocab=2048),
    "256x8": common.Shape(layers=8, hidden=256, ffn=704, vocab=2048),
}
WORKS = ("rollout", "update", "score")


def make_folder(folder: Path, shape: common.Shape):
    """Writes a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    head = shape.hidden // shape.heads
    Qwen3ForCausalLM(Qwen3Config(**shape.entries(2 * LONGEST), head_dim=head)).save_pretrained(folder)
    words = {f"w{number}": number for number in range(shape.vocab)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


class Side(NamedTuple):
    """A model with its engine."""

    chunk: torch.nn.Module
    engine: RolloutEngine


def build(folder: Path, shape: common.Shape) -> dict[str, Side]:
    """Both sides, with the folder's weights."""
    sides, pg_collection = {}, None
    for name, source in ((OURS, "transformers"), (MEGATRON, "megatron")):
        flags = f"--hf-model {folder} --model-source {source} --lr 1e-5"
        lengths = f"--max-prompt-length {LONGEST} --max-response-length {LONGEST}"
        (role,) = arguments.parse(f"{flags} {lengths}".split(), 1, "sft").roles.values()
        if pg_collection is None:
            pg_collection = role_mesh.create_mesh({role.name: role}, timedelta(minutes=10))[role.name].pg_collection
        model = gpt.build_model(role.megatron, shape.vocab, pg_collection)
        find_pretrained(role, shape.vocab, value_head=False).load(model, pg_collection)
        engine = RolloutEngine(model[0], pg_collection, shape.vocab, 2 * LONGEST, 0.1, REQUESTS)
        sides[name] = Side(model[0], engine)
    return sides


class Work:
    """What is measured of each side."""

    def __init__(self, vocab: int):
        self.vocab = vocab
        prompts = common.random_prompts([PROMPT] * REQUESTS, vocab)
        self.requests = [GenerationRequest(prompt, key, NEW) for key, prompt in enumerate(prompts)]
        self.lengths = torch.randint(PROMPT, LONGEST, (REQUESTS,), generator=torch.Generator().manual_seed(3))
        self.tokens = torch.tensor(sum(common.random_prompts(self.lengths.tolist(), vocab), []))

    def rollout(self, side: Side):
        """Completions of the requests."""
        return side.engine.generate(self.requests, (), SamplingSettings())

    def update(self, side: Side):
        """Forward and backward of the sequences."""
        side.chunk.train()
        side.chunk.zero_grad()
        forward_pass.token_scores(side.chunk, self.tokens, self.lengths, 1.0, self.vocab).logprobs.sum().backward()

    def score(self, side: Side) -> torch.Tensor:
        """Log-probs of the sequences."""
        return self.scores(side, self.tokens, self.lengths)

    @torch.inference_mode()
    def scores(self, side: Side, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Log-probs of any sequences."""
        return forward_pass.token_scores(side.chunk, tokens, lengths, 1.0, self.vocab).logprobs

    def gap(self, side: Side) -> float:
        """Largest difference of a rollout's log-probs from the scores of its tokens."""
        done = self.rollout(side)
        rows = [[*request.prompt, *each.tokens] for request, each in zip(self.requests, done, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        found = self.scores(side, torch.tensor(sum(rows, [])), lengths).split(lengths.tolist())
        gaps = [(row[-NEW:] - torch.tensor(each.logprobs)).abs().max() for row, each in zip(found, done, strict=True)]
        return float(torch.stack(gaps).max())


def process_seconds(work, side: Side) -> float:
    """Process time of a call."""
    started = time.process_time()
    work(side)
    return time.process_time() - started


def measure(args: argparse.Namespace) -> list[dict]:
    """A report of each work."""
    shape = CASES[args.case]
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), shape)
        sides = build(Path(folder), shape)
        work, reports = Work(shape.vocab), []
        one, other = (work.score(side) for side in sides.values())
        common.refuse_different(float((one - other).abs().max()))
        if gap := work.gap(sides[OURS]):
            raise common.Unusable(f"a rollout's log-probs differ from the scores of its tokens by {gap:.2e}")
        for name, amount in zip(WORKS, ({"steps": NEW}, *[{"tokens": len(work.tokens)}] * 2), strict=True):
            call = getattr(work, name)
            for side in sides.values():
                call(side)
            clocks = {key: lambda call=call, side=side: process_seconds(call, side) for key, side in sides.items()}
            seconds = common.alternate(clocks, args.rounds)
            reports.append(
                common.report(
                    name,
                    seconds,
                    amount,
                    MEGATRON,
                    of_least={key: min(each) / min(seconds[MEGATRON]) for key, each in seconds.items()},
                )
            )
    return reports


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    made = common.parser(__doc__, CASES, rounds=5)
    args = common.parsed(made, argv)
    reports = measure(args)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=2) + "\n")
    for found in reports:
        print(common.table(found, args.markdown))
        ratio = found["of_least"][OURS]
        print(f"{found['case']}: {ratio:.2f} of Megatron's process time, the least of each side's rounds")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
