"""What becomes of the episodes of a round: a packed batch, and what `--save-rollouts` keeps of each."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megarl.batch import FIELDS, Batch
from megarl.environments.protocol import Observation, checked
from megarl.mcore import device
from megarl.rollout.episodes.client import PlayedTurns
from megarl.rollout.episodes.episode import DONE, Episode
from megarl.rollout.episodes.message_tree import MessageTree
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
    fields = {name: torch.zeros(sum(lengths), dtype=FIELDS[name].dtype) for name in names}
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
        return record | {"asked": _asked(episode, played.tree)}
    seen = [dataclasses.asdict(observation) for observation in played.observations]
    return record | {"replayable": episode.replayable, "tools": played.tools, "observations": seen}


def _asked(episode: Episode, tree: MessageTree) -> list[dict[str, Any] | None]:
    """The requests of an agent's turns, in their order in the episode's rows; None: not known."""
    left, found = list(tree.written), []
    for number in range(len(episode.turns)):
        prompt, tokens = episode.before(number), episode.turn_tokens(number)
        turn = next((turn for turn in left if turn.prompt == prompt and list(turn.tokens or ()) == tokens), None)
        if turn is not None:
            left.remove(turn)
            found.append({"stream": turn.stream, "limit": turn.limit, "stops": list(turn.ask.stops)})
        else:  # a checkpoint has brought it
            found.append(None)
    return found


def observations_of(record: dict[str, Any]) -> list[Observation]:
    """The answers of a record; none of an agent's. ValueError or TypeError for one that no environment has given."""
    return [checked(Observation(**seen)) for seen in record.get("observations", ())]
