"""Environments that take their time: seconds of a rollout whose tools sleep, against the same without sleeping.

    PYTHONPATH=. python tools/bench/environments.py [--episodes 64] [--turns 4] [--sleep 0.1] [--requests 32]
        [--rounds 3] [--json FILE]

One rank, a model of 4 layers in fp32 with random weights, environments in a worker process as in a run. Turns have 64
tokens on average, since 1 of 64 tokens ends a turn; one that gets to 256 ends its episode. At most --requests episodes
are in the engine at a time, so that there is something to generate while others wait for their tools. The two sides
take turns and must generate the same tokens, or the benchmark fails; the ratio is that of the fastest rounds.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

from megarl.environments.pool import PoolOptions
from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn

LONGEST = 256  # tokens of a turn
OBSERVATION = list(range(70, 86))  # tokens
END_IDS = (64, 65, 66, 67)  # of VOCAB
VOCAB = 256


class Tool(BaseEnvironment):
    """Sleeps as long as the task says before it answers; ends after as many turns as it says."""

    def reset(self, task: Task) -> Observation:
        """Remembers the task."""
        self._sleep, self._turns = task.metadata["sleep"], task.metadata["turns"]
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """An answer after a while."""
        if self._sleep:
            await asyncio.sleep(self._sleep)
        return Observation([{"role": "user", "content": "a"}], done=turn.number + 1 == self._turns)


class FixedTokens:
    """In the place of `TurnTokens`: every observation has the same tokens."""

    def text(self, tokens) -> str:
        """A text of the turn's size."""
        return " ".join(map(str, tokens))

    def bridge(self, messages) -> list[int]:
        """Tokens of an observation."""
        return OBSERVATION


class Bench:
    """The engine and the environments of both sides."""

    def __init__(self, args: argparse.Namespace):
        from tools.bench import common

        self.args = args
        shape = common.Shape(layers=4, hidden=128, ffn=352, vocab=VOCAB)
        self.longest = args.turns * (LONGEST + len(OBSERVATION))
        chunk, pg_collection, _ = common.build(shape, (16, self.longest))
        from megarl.mcore.inference.engine import RolloutEngine

        self.engine = RolloutEngine(chunk, pg_collection, VOCAB, 16 + self.longest, 1.0, args.requests)
        self.client = self._client()

    def _client(self):
        from megarl.rollout.episodes.client import EnvironmentClient
        from megarl.rollout.episodes.episode import EpisodeLimits

        options = PoolOptions(1, 60.0, 0, "hermes", "tools.bench.environments:Tool")
        self.limits = EpisodeLimits(self.args.turns, LONGEST, self.longest)
        return EnvironmentClient(options, FixedTokens(), self.limits, 16, None, 0, 1)

    def run(self, sleep: float) -> tuple[float, dict[int, list[int]], float]:
        """(seconds, tokens of the episodes by number, seconds in which the engine waited)."""
        from megarl.algorithms.sampling_settings import SamplingSettings
        from megarl.comm.role_mesh import RoleGroups
        from megarl.mcore.inference.engine import RequestList
        from megarl.mcore.inference.generation import GenerationRequest
        from megarl.rollout.episodes.episode import Episode
        from megarl.rollout.episodes.source import EpisodeSource

        metadata = {"sleep": sleep, "turns": self.args.turns}
        requests = [(i, GenerationRequest([i % VOCAB, 1], i, 1)) for i in range(self.args.episodes)]

        def begin(number: int, request: GenerationRequest) -> Episode:
            self.client.begin(number, _Line(), list(request.prompt), Task([], metadata=metadata), None)
            return Episode(number, request, number, self.limits)

        alone = RoleGroups(
            role="rollout", ranks=range(1), replicas=((0,),), pg_collection=None, replica_group=None, rank=0,
            model_role="rollout",
        )  # fmt: skip
        source = EpisodeSource(RequestList(requests), begin, self.client, alone, self.args.episodes)
        started = time.perf_counter()
        for number, completion in self.engine.stream(source, END_IDS, SamplingSettings()):
            source.turn_ended(number, completion)
        seconds = time.perf_counter() - started
        return seconds, {episode.number: episode.tokens for episode in source.ended}, source.waiting_seconds


class _Line:
    """A prompt's line: only its environment is read."""

    environment, text = None, ""


def main():
    """Runs both sides in turns and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of each answer")
    parser.add_argument("--requests", type=int, default=32, help="episodes in the engine at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    from tools.bench.common import Unusable

    bench = Bench(args)
    bench.run(0.0)  # starts the worker
    rounds: dict[str, list[float]] = {"awake": [], "asleep": []}
    for _ in range(args.rounds):
        sides = {name: bench.run(sleep) for name, sleep in (("awake", 0.0), ("asleep", args.sleep))}
        if sides["awake"][1] != sides["asleep"][1]:
            raise Unusable("environments.py: the texts of the two sides differ")
        for name, (seconds, _, waited) in sides.items():
            rounds[name].append(seconds)
            print(f"{name:>7}: {seconds:6.2f} s, of which {waited:.2f} s with nothing to generate", flush=True)
    bench.client.close()
    tokens = sum(map(len, sides["awake"][1].values()))
    ratio = min(rounds["asleep"]) / min(rounds["awake"])
    print(f"  ratio: {ratio:6.2f} ({args.episodes} episodes, {tokens:,} tokens, tools sleep {args.sleep} s)")
    if args.json:
        found = {"ratio": ratio, "tokens": tokens, "seconds": rounds}
        args.json.write_text(json.dumps(found | {"options": vars(args)}, default=str))


if __name__ == "__main__":
    main()
