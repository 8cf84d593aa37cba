"""Counts of a step's training responses, of one replica, and the metrics of all replicas: of episodes, and of what the
engine did: decode steps, drafts, and prompts read."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.environments.calls import Answer
from megarl.environments.protocol import Observation, Turn
from megarl.errors import warn
from megarl.mcore import device
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import EngineCounts
from megarl.mcore.vision.store import ImageCounts
from megarl.measurements import MAX_PARTS, NamesOfRun
from megarl.rollout.episodes.agent_episode import AgentEpisode
from megarl.rollout.episodes.episode import FAILED, TRUNCATED, Episode

# `waiting`: seconds in which the replica waited for environments alone; `running`: of the whole rollout. `sharable`:
# turns that samples of a branch share; `shared`: those of them that others had got.
_COUNTS = (
    "episodes turns truncated failed calls malformed steps seconds late restarts journalled waiting running rows agents"
    " rewritten sharable shared"
).split()


class EpisodeStatistics:
    """What happened in the episodes since the last `take`, on the leader of a replica."""

    def __init__(self):
        self.counts: dict[str, float] = defaultdict(float)
        self.parts: dict[str, float] = defaultdict(float)
        self.failures: list[str] = []  # why environments failed

    def add(self, other: "EpisodeStatistics"):
        for own, added in ((self.counts, other.counts), (self.parts, other.parts)):
            for name, value in added.items():
                own[name] += value
        self.failures += other.failures

    def add_event(self, event: Answer):
        """Counts an answer of an environment."""
        c = self.counts
        c["steps"] += not event.from_journal
        c["seconds"] += event.seconds
        c["late"] += event.late
        c["restarts"] += event.replayed
        c["journalled"] += event.from_journal
        if event.turn is None and event.observation is not None:
            self._add_parts(event.observation)

    def _add_parts(self, observation: Observation):
        for name, value in observation.parts.items():
            self.parts[name] += value

    def add_episode(
        self, episode: Episode, turns: Iterable[Turn], observations: Iterable[Observation], rewritten: int = 0
    ):
        """Counts an episode that has ended, with what its environment was sent and has answered in all rounds, and how
        often its agent has rewritten the policy's turns."""
        c = self.counts
        c["episodes"] += 1
        c["turns"] += len(episode.turns)
        c["truncated"] += episode.end in TRUNCATED
        if isinstance(episode, AgentEpisode):
            c["agents"] += 1
            c["rows"] += 1 + len(episode.row_starts)
            c["rewritten"] += rewritten * (episode.end != FAILED)
        c["failed"] += episode.end == FAILED
        for turn in turns:
            c["calls"] += len(turn.calls)
            c["malformed"] += len(turn.errors)
        for observation in observations:
            self._add_parts(observation)


def metrics_of(own: EpisodeStatistics, role_groups: RoleGroups, known: NamesOfRun) -> dict[str, float]:
    """The metrics `environment/…` of all replicas' episodes; {} without episodes. A collective of the leaders.

    `known`: names of parts that earlier steps had; those of this step are added. The first replica says which have no
    room.
    """
    total = torch.tensor([own.counts[name] for name in _COUNTS], dtype=torch.float64, device=device.device())
    counts = dict(zip(_COUNTS, role_groups.dp_all_reduce(total).tolist(), strict=True))
    parts = role_groups.gather_replicas(dict(own.parts))
    names = sorted({name for of_replica in parts for name in of_replica})
    if (beyond := known.beyond(names)) and not known.had_more and role_groups.dp_rank == 0:
        more = f"environments have given more than {MAX_PARTS} names of parts; metrics have the first {MAX_PARTS}"
        warn([f"{more}, without {beyond[0]!r} and others"])
    known.add(names)
    names = [name for name in names if name in known]
    episodes = counts["episodes"]
    if not episodes:
        return {}
    of_some: dict[str, float] = {}
    if counts["agents"]:
        of_some = {
            "agent/rows_per_episode": counts["rows"] / counts["agents"],
            "agent/rewritten_history": int(counts["rewritten"]),
        }
    if counts["sharable"]:
        of_some["environment/shared_turns"] = int(counts["shared"])
    return of_some | {
        "environment/turns_mean": counts["turns"] / episodes,
        "environment/tool_calls": int(counts["calls"]),
        "environment/malformed_calls": int(counts["malformed"]),
        "environment/truncated_fraction": counts["truncated"] / episodes,
        "environment/failures": int(counts["failed"]),
        "environment/failed_fraction": counts["failed"] / episodes,
        "environment/restarts": int(counts["restarts"]),
        "environment/timeouts": int(counts["late"]),
        "environment/journalled_steps": int(counts["journalled"]),
        "environment/step_s": counts["seconds"] / max(counts["steps"], 1.0),
        "environment/waiting_share": counts["waiting"] / max(counts["running"], 1e-9),
        **{f"environment/reward/{name}": math.fsum(p.get(name, 0.0) for p in parts) / episodes for name in names},
    }


# -- what the engine did -----------------------------------------------------------------------------------------------


class EngineStatistics:
    """The counts of a replica's engine since the last `take_metrics`, on a rank of the rollout."""

    def __init__(self, settings: Settings, role_groups: RoleGroups):
        self._settings, self._role_groups = settings, role_groups
        self._counts = EngineCounts()
        self._images: ImageCounts | None = None

    def add(self, engine: RolloutEngine, is_training: bool):
        """Counts what the engine did since the last call, if it was for training."""
        counts, images = engine.take_counts(), engine.take_image_counts()
        if is_training:
            self._images = images if self._images is None or images is None else self._images.plus(images)
            self._counts = self._counts.plus(counts)

    def take_metrics(self) -> dict[str, float]:
        """The metrics `rollout/…` and `images/…` of all replicas; {} without drafts, prefix caching and images. A
        collective of the role."""
        s, role_groups = self._settings, self._role_groups
        drafts = s.speculative_rollout or s.mtp_drafts
        images, self._images = self._images, None
        of_images = {} if images is None else images.metrics(role_groups)
        if not (drafts or s.rollout_prefix_caching):
            return of_images
        counts, self._counts = self._counts, EngineCounts()
        table = torch.zeros(len(role_groups.replicas), len(counts), dtype=torch.int64, device=device.device())
        table[role_groups.dp_rank] = torch.tensor(counts)
        table = role_groups.dp_all_reduce(table)
        total, found = EngineCounts._make(table.sum(0).tolist()), of_images
        if drafts:
            found |= {
                "rollout/decode_steps": int(table[:, 0].max()),
                "rollout/accepted_tokens_per_step": total.tokens / max(total.requests, 1),
                "rollout/draft_acceptance": total.accepted / max(total.drafted, 1),
            }
        if s.mtp_drafts:
            found["rollout/mtp_acceptance"] = total.right / max(total.predicted, 1)
        if s.rollout_prefix_caching:
            found |= {"rollout/prefill_tokens": total.read, "rollout/reused_tokens": total.reused}
        return found
