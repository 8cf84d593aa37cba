"""What becomes of the episodes of a round: a packed batch, what `--save-rollouts` keeps of each, and those that a later
round continues (`--partial-rollouts`).

Tokens of the latter are in the batch of the partial rollouts. An environment that a checkpoint brings is played again
from its seeds, its turns and what it has answered to them, as after a crash.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.batch import FIELDS, Batch
from megarl.environments.protocol import Observation, checked
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.rollout.episodes.agent_episode import AgentEpisode
from megarl.rollout.episodes.client import EnvironmentClient, PlayedTurns
from megarl.rollout.episodes.episode import DONE, UNKNOWN, Episode, EpisodeLimits
from megarl.rollout.requests import unknown_routes


def episodes_to_batch(
    episodes: Iterable[Episode],
    empty_routes: Tensor | None = None,
    has_forced: bool = False,
    version: int | None = None,
) -> Batch:
    """The episodes of a replica in ascending order of their numbers; only what the policy has chosen is in the mask.

    `episodes` have ended, or a later round continues them. `empty_routes`: [0, L, k] routes of no tokens; None if none
    are recorded. `has_forced`: turns have a thinking budget. `version`: of the policy, for the tokens of this round;
    None: the batch has no versions.
    """
    ordered = sorted(episodes, key=lambda episode: episode.number)
    lengths = [len(episode.tokens) for episode in ordered]
    names = ["rollout_logprobs", "response_mask", "turn_rewards", "row_starts", *["forced"] * has_forced]
    fields = {name: torch.zeros(sum(lengths), dtype=FIELDS[name]["dtype"]) for name in names}
    if version is not None:
        fields["versions"] = torch.full((sum(lengths),), version, dtype=torch.int32)
    routes = None
    if empty_routes is not None:
        routes = torch.cat([empty_routes, *(_routes(episode, empty_routes) for episode in ordered)])
    first = 0
    for episode, length in zip(ordered, lengths, strict=True):
        _fill(episode, {name: field[first : first + length] for name, field in fields.items()})
        first += length
    batch = Batch(
        sequence_ids=torch.tensor([episode.number for episode in ordered], dtype=torch.int64),
        prompt_ids=torch.tensor([episode.line for episode in ordered], dtype=torch.int64),
        prompt_lengths=torch.tensor([episode.prompt_length for episode in ordered], dtype=torch.int64),
        finished=torch.tensor([episode.end == DONE for episode in ordered], dtype=torch.bool),
        solved=torch.tensor([episode.solved for episode in ordered], dtype=torch.bool),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens=torch.tensor([token for episode in ordered for token in episode.tokens], dtype=torch.int64),
        routes=routes,
        **fields,
    )
    return batch.to(device.device())


def _fill(episode: Episode, fields: dict[str, Tensor]):
    turns = zip(episode.turns, episode.logprobs, episode.rewards, strict=True)
    for number, ((start, end), logprobs, reward) in enumerate(turns):
        fields["rollout_logprobs"][start:end] = torch.tensor(logprobs, dtype=torch.float32)
        fields["response_mask"][start:end] = True
        begin_forced, end_forced = episode.forced_in(number)
        if begin_forced < end_forced:
            fields["response_mask"][begin_forced:end_forced] = False
            fields["forced"][begin_forced:end_forced] = True
        last = begin_forced if end_forced == end else end  # after the last token that the policy has chosen
        fields["turn_rewards"][last - 1] = reward
    fields["row_starts"][episode.row_starts] = True
    for start, versions in episode.known_versions if "versions" in fields else ():
        if start + len(versions) <= len(episode.tokens):  # an episode that failed has lost its turns
            fields["versions"][start : start + len(versions)] = torch.tensor(versions, dtype=torch.int32)


def _routes(episode: Episode, empty_routes: Tensor) -> Tensor:
    """[tokens, L, k] routes of an episode; unknown for one that has failed, has not ended, or ended before."""
    if episode.routes is not None and episode.end is not None:
        return episode.routes
    return unknown_routes(empty_routes, len(episode.tokens))


def record_of(episode: Episode, played: PlayedTurns) -> dict[str, Any]:
    """An episode that has ended, as JSON.

    `turns` are [start, end) in its tokens, and `rewards` theirs. Of an environment, `observations` are the answers to
    them, without one of a last turn that was cut, and `tools` those of the reset. Of an agent, `asked` are its requests
    for them: random stream, limit in tokens, and stop strings.
    """
    record = {name: getattr(episode, name) for name in ("key", "end", "turns", "rewards", "solved")}
    if played.tree is not None:
        return record | {"asked": episode.asked}
    seen = [dataclasses.asdict(observation) for observation in played.observations]
    return record | {"replayable": episode.replayable, "tools": played.tools, "observations": seen}


def observations_of(record: dict[str, Any]) -> list[Observation]:
    """The answers of a record; none of an agent's. ValueError or TypeError for one that no environment has given."""
    return [checked(Observation(**seen)) for seen in record.get("observations", ())]


# -- episodes that a later round continues -----------------------------------------------------------------------------


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
    if episode.end is None and episode.turn_limit < 1:
        raise UsageError(
            f"--load: the checkpoint holds an unfinished episode for which turns of {limits.turn} tokens and responses "
            f"of {limits.response} leave no room; use the --max-turn-length and --max-response-length of its run"
        )
    return episode


def _turns(mask: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run of True."""
    edges = [i for i, (before, here) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))
