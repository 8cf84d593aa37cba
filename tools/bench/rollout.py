"""Rollout: tokens per second of megarl's engine against Hugging Face's `generate` and vLLM, same weights and requests.

    PYTHONPATH=. python tools/bench/rollout.py --case plain|prefix|ragged [--rounds 5] [--json FILE] [--markdown]
        [--peers hf,hf-batch,vllm] [--vllm-python INTERPRETER]

A model of 12 layers in fp32 with random weights samples at temperature 1, without an end token, so that lengths are
known. plain: 32 requests of 16–22 tokens, 64 new ones. prefix: 8 prompts of 384 tokens, 16 samples each, 64 new ones.
ragged: 64 requests with log-normal response lengths (median 64, one of 512). Only requested tokens are counted.

hf is `generate` as documented for batches: left padding, SDPA, a KV cache, inference mode; a batch ends with its
longest request. hf-batch is Hugging Face's continuous batching. vllm runs in the interpreter --vllm-python with its
own torch. Only megarl also returns log-probs, which training needs. Each side has a short warm-up call.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore import device
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from tools.bench import common

SHAPE = common.Shape(layers=12, hidden=512, ffn=1536, vocab=32_000)
PEERS = {"hf": "transformers", "hf-batch": "transformers"}
NO_END = ()  # no token ends a response
BLOCK = 16  # tokens per block of the engine's cache
PAGE = 32  # tokens per page of Hugging Face's paged cache


@dataclass(frozen=True)
class Case:
    """Requests: `samples` responses to each of the `prompts`; `new_tokens` of each request."""

    prompts: list[list[int]]
    samples: int
    new_tokens: list[int]

    @property
    def longest(self) -> int:
        """Longest prompt plus longest response, tokens."""
        return max(map(len, self.prompts)) + max(self.new_tokens)

    def share(self, rank: int, ranks: int) -> "Case":
        """Every `ranks`-th prompt from `rank` on, with all of its requests."""
        chosen = range(rank, len(self.prompts), ranks)
        new_tokens = [self.new_tokens[prompt * self.samples + i] for prompt in chosen for i in range(self.samples)]
        return Case([self.prompts[prompt] for prompt in chosen], self.samples, new_tokens)

    def first(self, prompts: int, new_tokens: int) -> "Case":
        """The first prompts, with responses of `new_tokens` tokens."""
        return Case(self.prompts[:prompts], self.samples, [new_tokens] * prompts * self.samples)

    def requests(self) -> list[GenerationRequest]:
        """The requests, samples of a prompt in sequence, as in the rollout of a step."""
        texts = [prompt for prompt in self.prompts for _ in range(self.samples)]
        return [
            GenerationRequest(text, key, new)
            for key, (text, new) in enumerate(zip(texts, self.new_tokens, strict=True))
        ]


def _short(count: int) -> list[int]:
    return [16 + i % 7 for i in range(count)]


CASES = {
    "plain": lambda: Case(common.random_prompts(_short(32), SHAPE.vocab), 1, [64] * 32),
    "prefix": lambda: Case(common.random_prompts([384] * 8, SHAPE.vocab), 16, [64] * 128),
    "ragged": lambda: Case(
        common.random_prompts(_short(64), SHAPE.vocab), 1, common.log_normal_lengths(64, 512, 0.8).tolist()
    ),
}


def shorten(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """A few requests with a few tokens, for warm-up."""
    return [replace(request, max_new_tokens=4) for request in requests[:4]]


def timed(work, requests: list[GenerationRequest]) -> float:
    """Seconds in which `work` returns the requests' tokens. RuntimeError for wrong lengths."""
    started = time.perf_counter()
    responses = work(requests)
    seconds = time.perf_counter() - started
    if [len(tokens) for tokens in responses] != [request.max_new_tokens for request in requests]:
        raise RuntimeError("a side generated other lengths than requested")
    return seconds


def megarl_side(chunk, pg_collection, case: Case):
    """The engine as in the rollout of a training run."""
    count = len(case.new_tokens)
    engine = RolloutEngine(
        chunk, pg_collection, SHAPE.vocab, case.longest, buffer_gb(case), count, prefix_caching=case.samples > 1
    )
    return lambda requests: [c.tokens for c in engine.generate(requests, NO_END, SamplingSettings())]


def buffer_gb(case: Case, shape: common.Shape = SHAPE) -> float:
    """GiB of an fp32 KV cache for all requests at full length, in whole blocks, plus a tenth."""
    token = 2 * 4 * shape.layers * shape.groups * shape.hidden // shape.heads
    length = -(-case.longest // BLOCK) * BLOCK
    return 1.1 * token * length * len(case.new_tokens) / 2**30


def hf_side(peer):
    """`generate` on the left-padded batch; tokens beyond a request's length are cut off."""

    def work(requests):
        width = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        for row, request in zip(ids, requests, strict=True):
            row[width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask = torch.arange(width) >= torch.tensor([[width - len(request.prompt)] for request in requests])
        longest = max(request.max_new_tokens for request in requests)
        with torch.inference_mode():
            generated = peer.generate(
                ids.to(device.device()), attention_mask=mask.long().to(device.device()), max_new_tokens=longest,
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True,
            )[:, width:].tolist()  # fmt: skip
        return [row[: request.max_new_tokens] for row, request in zip(generated, requests, strict=True)]

    return work


def hf_batch_side(peer, case: Case):
    """Continuous batching with a paged cache for all requests; finished requests leave the batch."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(case.new_tokens)
    sampled = GenerationConfig(
        max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=NO_END, pad_token_id=0
    )
    blocks = len(case.new_tokens) * -(-case.longest // PAGE)
    paged = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=4096)

    def work(requests):
        found = {}
        manager = peer.continuous_batching_context_manager(
            generation_config=sampled, continuous_batching_config=paged, block=True, timeout=5
        )
        with torch.no_grad(), manager as running:
            for number, request in enumerate(requests):
                running.add_request(request.prompt, str(number), max_new_tokens=request.max_new_tokens)
            while len(found) < len(requests):
                result = running.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[int(result.request_id)] = result.generated_tokens
                elif result is None and not running.is_running():
                    raise common.Unusable("Hugging Face's continuous batching ended early; see its output above")
        return [found[number] for number in range(len(requests))]

    return work


def write_requests(file: Path, case: Case):
    """Writes what vllm_side.py reads."""
    requests = [(request.prompt, request.max_new_tokens) for request in case.requests()]
    file.write_text(json.dumps({"requests": requests, "longest": case.longest}))


class VllmSide:
    """vLLM in its own process, which measures the time and is idle while another side is timed."""

    def __init__(self, interpreter: str, peer, case: Case, folder: Path):
        peer.save_pretrained(folder / "model")
        write_requests(folder / "requests.json", case)
        command = [interpreter, str(Path(__file__).with_name("vllm_side.py")), str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._log = folder / "vllm.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self._answer()

    def __call__(self) -> float:
        """Seconds of a round."""
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise common.Unusable(f"{self._log.read_text()}vLLM ended with status {self._process.wait()}")

    def close(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(args: argparse.Namespace, peers: list[str]) -> dict:
    """Times all sides alternately."""
    case = CASES[args.case]()
    requests = case.requests()
    chunk, pg_collection, namespace = common.build(SHAPE, (max(map(len, case.prompts)), max(case.new_tokens)))
    peer = common.export(chunk, SHAPE, namespace, case.longest).eval()
    make = {"hf": lambda: hf_side(peer), "hf-batch": lambda: hf_batch_side(peer, case)}
    sides = {common.OURS: megarl_side(chunk, pg_collection, case)} | {name: make[name]() for name in peers}
    for work in sides.values():
        timed(work, shorten(requests))
    clocks = {side: lambda work=work: timed(work, requests) for side, work in sides.items()}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if args.vllm_python:
            clocks["vllm"] = VllmSide(args.vllm_python, peer, case, Path(folder))
            stack.callback(clocks["vllm"].close)
        seconds = common.alternate(clocks, args.rounds)
    tokens = sum(case.new_tokens)
    requested = {
        "mean_length": tokens / len(requests),
        "longest_length": max(case.new_tokens),
        "requests": len(requests),
    }
    return common.report(args.case, seconds, {"tokens": tokens}, **requested)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the flags; `peers` becomes a list."""
    made = common.parser(__doc__, CASES, rounds=5)
    made.add_argument(
        "--peers", default="hf", help=f"peers, separated by commas: {', '.join(PEERS)}; default: %(default)s"
    )
    made.add_argument("--vllm-python", help="Python interpreter with vLLM; default: variable VLLM_PYTHON")
    args = common.parsed(made, argv)
    args.peers = args.peers.split(",")
    if unknown := set(args.peers) - set(PEERS):
        made.error(f"--peers {','.join(sorted(unknown))}: allowed are {', '.join(PEERS)}")
    args.vllm_python = args.vllm_python or os.environ.get("VLLM_PYTHON")
    if args.vllm_python and not shutil.which(args.vllm_python):
        made.error(f"--vllm-python {args.vllm_python}: no such program")
    return args


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    args = parse(argv)
    peers = common.installed({name: PEERS[name] for name in args.peers})
    if not args.vllm_python:
        print("vllm is skipped: set --vllm-python to an interpreter with vLLM", flush=True)
    found = measure(args, peers)
    print(f"{found['requests']} requests, {found['work']['tokens']} new tokens, mean {found['mean_length']:.1f}")
    common.publish(found, args, SHAPE)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
