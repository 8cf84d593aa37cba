"""Episodes that a later round continues (`--partial-rollouts`), and what a checkpoint has to know of them.

Their tokens are in the batch of the partial rollouts. An environment that a checkpoint brings is played again from its
seeds, its turns and what it has answered to them, as after a crash.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.batch import Batch
from megarl.environments.protocol import Observation, checked
from megarl.errors import UsageError
from megarl.rollout.episodes.agent_episode import AgentEpisode
from megarl.rollout.episodes.client import EnvironmentClient, PlayedTurns
from megarl.rollout.episodes.episode import UNKNOWN, Episode, EpisodeLimits

_FACTS = ("rewards", "verdicts", "is_open", "end")  # of an episode, in a checkpoint


class CarriedEpisodes:
    """The episodes of the groups that this replica holds, by key, on all of its ranks."""

    def __init__(self, limits: EpisodeLimits, client: EnvironmentClient | None):
        """`client`: on the replica's leader, has their environments; None elsewhere."""
        self._limits, self._client = limits, client
        self._episodes: dict[str, Episode] = {}

    def get(self, key: str) -> Episode | None:
        """The episode, as the last round has left it; None if it is not one of them."""
        return self._episodes.get(key)

    def add(self, episodes: Iterable[Episode]):
        """Adds the episodes of a round that has ended; they replace those that it has continued."""
        self._episodes |= {episode.key: episode for episode in episodes if episode.key is not None}

    def retain(self, keys: Iterable[str]):
        """Ends all episodes but these, with their environments."""
        retained = {*keys}
        for key in [key for key in self._episodes if key not in retained]:
            del self._episodes[key]
            if self._client is not None:
                self._client.forget(key)

    def of(self, keys: Iterable[str]) -> list[Episode]:
        """The episodes of these keys, which are there."""
        return [self._episodes[key] for key in keys]

    def facts(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """What a checkpoint has to know of these episodes besides their rows of the batch; on the replica's leader."""
        facts = []
        for key in keys:
            episode, played = self._episodes[key], self._client.kept.get(key, PlayedTurns())
            fact = {name: getattr(episode, name) for name in _FACTS}
            fact |= {"observations": [*map(dataclasses.asdict, played.observations)], "tools": played.tools}
            if isinstance(episode, AgentEpisode) and episode.end is None:
                fact["agent"] = episode.facts() | {"asked": played.asked}
            facts.append(fact)
        return facts

    def load(self, facts: list[dict[str, Any]], batch: Batch, keys: Sequence[str], is_own: Tensor) -> list[bool]:
        """Adds those episodes of a replica in a checkpoint that this replica takes; returns whether each has ended.

        `facts`: of `facts`, if they are damaged, any exception may come; `batch`, `keys`: their rows and keys;
        `is_own`: [N] bool, those to take. UsageError if one has no room left under the run's limits.
        """
        ended = []
        for i, (fact, key, own) in enumerate(zip(facts, keys, is_own.tolist(), strict=True)):
            episode = _episode(batch.select(torch.tensor([i])), key, fact, self._limits)
            ended.append(episode.end is not None)
            if own:
                self.add([episode])
                if self._client is not None and isinstance(episode, AgentEpisode):
                    self._client.kept[key] = PlayedTurns(facts=fact["agent"])
                elif self._client is not None and episode.end is None:
                    seen = [checked(Observation(**record)) for record in fact["observations"]]
                    self._client.kept[key] = PlayedTurns(observations=seen, tools=fact["tools"], sent=len(seen))
        return ended


def _episode(row: Batch, key: str, fact: dict, limits: EpisodeLimits) -> Episode:
    """The episode of a batch with one row. UsageError if it has not ended and may get no more tokens."""
    mask = row.response_mask if row.forced is None else row.response_mask | row.forced
    turns = _turns(mask.tolist())
    logprobs = row.rollout_logprobs.tolist()
    episode = Episode(
        number=0, request=UNKNOWN, line=int(row.prompt_ids), limits=limits, key=key, tokens=row.tokens.tolist(),
        prompt_length=int(row.prompt_lengths), turns=turns, logprobs=[logprobs[start:end] for start, end in turns],
        row_starts=row.row_starts.nonzero().flatten().tolist(), known_versions=[(0, row.versions.tolist())],
        **{name: fact[name] for name in _FACTS},
    )  # fmt: skip
    if episode.end is None and "agent" in fact:
        if len(fact["agent"]["asked"]) != len(fact["agent"]["turns"]):
            raise ValueError("an agent's requests are not its turns")
        episode = AgentEpisode.restored(episode, fact["agent"])
    room = episode.room_of_open_turn if isinstance(episode, AgentEpisode) else episode.turn_limit
    if episode.end is None and room < 1:
        raise UsageError(
            f"--load: the checkpoint holds an unfinished episode for which turns of {limits.turn} tokens and responses "
            f"of {limits.response} leave no room; use the --max-turn-length and --max-response-length of its run"
        )
    return episode


def _turns(mask: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run of True."""
    edges = [i for i, (before, here) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))
