"""What `--save-rollouts` keeps of an episode besides its tokens: what its environment answered, or its agent asked."""

import dataclasses
from typing import Any

from megarl.environments.protocol import Observation, checked
from megarl.rollout.episodes.client import PlayedTurns
from megarl.rollout.episodes.episode import Episode
from megarl.rollout.episodes.message_tree import MessageTree


def record_of(episode: Episode, played: PlayedTurns) -> dict[str, Any]:
    """An episode that has ended, as JSON.

    `turns` are [start, end) in its tokens, and `rewards` theirs. Of an environment, `observations` are the answers to
    them, without one of a last turn that was cut, and `tools` those of the reset. Of an agent, `asked` are its requests
    for them: random stream, limit in tokens, and stop strings.
    """
    record = {
        "key": episode.key,
        "end": episode.end,
        "turns": [list(turn) for turn in episode.turns],
        "rewards": episode.rewards,
        "solved": episode.solved,
    }
    if played.tree is not None:
        return record | {"asked": _asked(episode, played.tree)}
    seen = [dataclasses.asdict(observation) for observation in played.observations]
    return record | {"replayable": episode.replayable, "tools": played.tools, "observations": seen}


def _asked(episode: Episode, tree: MessageTree) -> list[dict[str, Any] | None]:
    """The requests of an agent's turns, in their order in the episode's rows; None: not known."""
    left, found = list(tree.written), []
    for start, end in episode.turns:
        row = max((first for first in episode.row_starts if first <= start), default=0)
        prompt, tokens = episode.tokens[row:start], episode.tokens[start:end]
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
