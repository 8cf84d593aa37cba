"""Episodes of several turns: the engine with the cache of earlier turns, against one that reads each prompt again.

    PYTHONPATH=. python tools/bench/turns.py [--episodes 32] [--turns 5] [--observations 100-200] [--written 48]
        [--prompt-length 200] [--samples 1] [--buffer-gb 2] [--rounds 3] [--markdown] [--json FILE]

A turn's prompt is the last prompt, the tokens written then, and an observation of random tokens, which is there at
once. The model has random weights and no end token, so every turn has the same length. Both engines generate all turns
in one call, alternately; tokens and log-probs of both must be equal, or the benchmark fails. Prints medians, their
ratio, and the prompt tokens that each engine read. `--samples`: episodes that begin with the same prompt;
`--buffer-gb`: the cache, whose default holds everything.
"""

import argparse
import time
from collections import deque

import torch

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from tools.bench import common

SHAPE = common.Shape(layers=8, hidden=256, ffn=768, vocab=8192)
REUSED, READ_AGAIN = "reuse", "read again"
SIZES = {"episodes": 32, "turns": 5, "written": 48, "prompt-length": 200, "samples": 1}


class Turns:
    """A source of requests: the next turn of an episode comes when its last one has ended."""

    def __init__(self, prompts: list[list[int]], observations: list[list[list[int]]], written: int):
        """`prompts`, `observations` (those after each turn but the last): by episode; `written`: tokens of a turn."""
        self.observations, self.found = observations, [[] for _ in prompts]  # completions by episode and turn
        self._left = len(prompts) * (len(observations[0]) + 1)
        self._last = [GenerationRequest(prompt, key, written) for key, prompt in enumerate(prompts)]
        self._ready = deque(enumerate(self._last))

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """The next turns of at most `room` episodes."""
        taken = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        self._left -= len(taken)
        return taken

    def is_empty(self) -> bool:
        """Whether all turns were taken."""
        return not self._left

    def wait(self):
        """Nothing is late."""

    def ended(self, episode: int, completion):
        """Makes the next turn of an episode."""
        turn, before = len(self.found[episode]), self._last[episode]
        self.found[episode].append(completion)
        if turn < len(self.observations[episode]):
            prompt = [*before.prompt, *completion.tokens, *self.observations[episode][turn]]
            self._last[episode] = GenerationRequest(prompt, before.key, before.max_new_tokens)
            self._ready.append((episode, self._last[episode]))


def episodes_of(args: argparse.Namespace, vocab: int) -> Turns:
    """The episodes that the flags describe; the same ones in every round."""
    first, last = args.observations
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(first, last + 1, (args.episodes, args.turns - 1), generator=generator)
    texts = iter(common.random_prompts(lengths.flatten().tolist(), vocab))
    prompts = common.random_prompts([args.prompt_length] * args.episodes, vocab)
    prompts = [prompts[number // args.samples] for number in range(args.episodes)]
    return Turns(prompts, [[next(texts) for _ in row] for row in lengths], args.written)


def timed(engine: RolloutEngine, episodes: Turns) -> float:
    """Seconds in which the engine generates all turns."""
    started = time.perf_counter()
    for number, completion in engine.stream(episodes, (), SamplingSettings()):
        episodes.ended(number, completion)
    return time.perf_counter() - started


def measure(args: argparse.Namespace, shape: common.Shape) -> dict:
    """Times both engines alternately, after a round that does not count."""
    observed = args.observations[1] * (args.turns - 1)
    longest = args.prompt_length + args.turns * args.written + observed
    chunk, pg_collection, _ = common.build(shape, (args.prompt_length, longest - args.prompt_length))
    engines = {
        name: RolloutEngine(
            chunk,
            pg_collection,
            shape.vocab,
            longest,
            args.buffer_gb,
            args.episodes,
            prefix_caching=name == REUSED,
        )
        for name in (REUSED, READ_AGAIN)
    }
    found, counts = {}, {}

    def side(name):
        def run():
            episodes = episodes_of(args, shape.vocab)
            seconds = timed(engines[name], episodes)
            found[name], counts[name] = episodes.found, engines[name].take_counts()
            return seconds

        return run

    seconds = common.alternate({name: side(name) for name in engines}, args.rounds + 1)
    if found[REUSED] != found[READ_AGAIN]:
        raise common.Unusable("turns.py: responses with reuse differ from those without")
    read = {name: count.read for name, count in counts.items()}
    return common.report(
        "turns", {name: times[1:] for name, times in seconds.items()},
        {"tokens": args.episodes * args.turns * args.written}, REUSED,
        read_tokens=read, reused_tokens=counts[REUSED].reused, read_ratio=read[READ_AGAIN] / read[REUSED],
    )  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the flags; `observations` becomes the shortest and the longest length."""
    made = common.parser(__doc__, {}, rounds=3)
    for name, default in SIZES.items():
        made.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    made.add_argument("--observations", default="100-200", metavar="MIN-MAX", help="tokens; default: %(default)s")
    made.add_argument("--buffer-gb", type=float, default=2.0, help="cache of each engine, GiB; default: %(default)s")
    args = common.parsed(made, argv)
    for name in SIZES:
        if getattr(args, name.replace("-", "_")) < 1:
            made.error(f"--{name} {getattr(args, name.replace('-', '_'))}: must be at least 1")
    bounds = args.observations.split("-")
    if len(bounds) != 2 or not all(bound.isdecimal() for bound in bounds) or not 1 <= int(bounds[0]) <= int(bounds[1]):
        made.error(f"--observations {args.observations}: allowed is MIN-MAX, at least 1")
    args.observations = tuple(map(int, bounds))
    return args


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    args = parse(argv)
    found = measure(args, SHAPE)
    common.publish(found, args, SHAPE)
    read = found["read_tokens"]
    print(f"prompt tokens read: {read[REUSED]:,} with reuse, {read[READ_AGAIN]:,} without ({found['read_ratio']:.2f})")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
