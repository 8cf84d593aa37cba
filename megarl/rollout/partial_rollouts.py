"""Groups whose responses are not finished, which the next round continues.

Partial rollouts (Kimi k1.5, arXiv 2501.12599 §2.6; APRIL, 2509.18521): a round that stops early keeps its unfinished
groups, with the log-probs and the version of each token. The next round starts with them, on the replica that generated
a group's first tokens, with the environments of its episodes.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch, concatenate, empty_batch, generated_fields
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.groups import PromptGroups
from megarl.rollout.episodes.episode import FAILED, Episode
from megarl.rollout.episodes.results import CarriedEpisodes
from megarl.rollout.group_buffer import own_share, truncated_to
from megarl.rollout.requests import PromptRequest, batch_to_responses, earlier_responses, episode_keys, groups_of
from megarl.rollout.response_log import Record
from megarl.rollout.waiting_groups import VERSIONS

NO_TOKEN = 1 << 40  # stands for the version of a group without tokens: later than any


class CarriedGroup(NamedTuple):
    """What every rank of the rollout knows of an unfinished group, and its rows on the replica that holds it."""

    request: PromptRequest  # without tokens; an episode that has ended in any way has no length
    oldest: int  # policy version of its oldest token; `NO_TOKEN` without any
    rows: Batch | None = None  # on the host, with the samples' numbers as ids; None on other replicas


class PartialRolloutBuffer:
    """The unfinished groups, oldest first. Each replica holds the responses that it generated and continues them."""

    def __init__(self, role_groups: RoleGroups, settings: Settings, episodes: CarriedEpisodes | None = None):
        """`role_groups`: of the rollout; `episodes`: keeps those of an environment; None: responses have one turn."""
        self.role_groups, self.settings, self.episodes = role_groups, settings, episodes
        self._fields = [*generated_fields(settings), VERSIONS]
        self.dropped = 0  # groups dropped since the last `metrics`: for `--max-staleness`, or `_replayable`
        self._groups: list[CarriedGroup] = []  # of all replicas, the same on every rank of the rollout

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def requests(self) -> list[PromptRequest]:
        """Of the groups, without tokens."""
        return [group.request for group in self._groups]

    def clear(self):
        """Removes all groups."""
        self._groups = []
        self._retain_episodes()

    @property
    def rows(self) -> Batch:
        """This replica's rows, on the host; ids number the responses of all replicas' groups."""
        found, first = [empty_batch(self._fields, "cpu")], 0
        for group in self._groups:
            if group.rows is not None:
                found.append(dataclasses.replace(group.rows, sequence_ids=group.rows.sequence_ids + first))
            first += group.request.samples
        return concatenate(found)

    def pop_oldest(self, count: int, trained_version: int) -> list[PromptRequest]:
        """Removes and returns at most `count` groups, oldest first; drops those that are too old for `--max-staleness`.
        `keep_unfinished` puts back those not taken. `trained_version`: of the policy that trains on them."""
        if limit := self.settings.max_staleness:
            fresh = [group for group in self._groups if trained_version - group.oldest <= limit]
            self.dropped += len(self) - len(fresh)
            self._groups = fresh
            self._retain_episodes()
        popped, self._groups = self._groups[:count], self._groups[count:]
        return [self._request(group) for group in popped]

    def _request(self, group: CarriedGroup) -> PromptRequest:
        """The request of a group, with its responses where this replica holds them and they are no episodes."""
        if group.rows is None or self.episodes is not None:
            return group.request
        responses = tuple(batch_to_responses(group.rows))
        return group.request._replace(tokens=responses[0].asked.prompt, responses=responses)

    def _retain_episodes(self):
        if self.episodes is not None:
            self.episodes.retain(episode_keys(self.requests))

    def keep_unfinished(
        self, batch: Batch, requests: list[PromptRequest], taken: Tensor, longest: int | None
    ) -> tuple[Batch, int]:
        """Keeps the groups of a round that are not taken. Returns (this rank's batch, cut; its new tokens).

        Responses are truncated to `longest` new tokens. An unfinished response has at least that many, so the result
        does not depend on the layout or on timing. Episodes have been already (`EpisodeRunner.settle`). A group with an
        unfinished episode whose environment cannot be replayed is dropped. A collective of the rollout if groups are
        kept.

        Args:
            batch: of `Rollout.generate`, with versions; one replica has all responses of a group that is not taken.
            requests: given to `Rollout.generate`, those of `pop_oldest` first.
            taken, longest: of `Rollout.earliest_groups`; all groups and None if all are taken. None also if a schedule
                says how many tokens each response has.
        """
        episodes: list[Episode] = []  # of this replica's rows
        if self.episodes is None:
            all_earlier = earlier_responses(requests)
            earlier = [all_earlier[i] for i in batch.sequence_ids.tolist()]
            if longest is not None:
                before = batch.lengths.new_tensor([0 if each is None else each.length for each in earlier])
                batch = truncated_to(batch, longest, before)
            new_tokens = int(batch.response_mask.sum()) - sum(each.chosen for each in earlier if each is not None)
        else:
            keys = episode_keys(requests)
            episodes = self.episodes.of(keys[i] for i in batch.sequence_ids.tolist())
            new_tokens = sum(episode.new_tokens for episode in episodes if episode.end != FAILED)
        is_kept = torch.ones(len(requests), dtype=torch.bool)
        is_kept[taken] = False
        if self.episodes is not None and is_kept.any():
            is_kept = self._replayable(batch.sequence_ids, episodes, groups_of(requests), is_kept)
        if is_kept.any():
            self._keep(batch, episodes, requests, is_kept)
        self._retain_episodes()
        return batch, new_tokens

    def _replayable(
        self, sequence_ids: Tensor, episodes: list[Episode], groups: PromptGroups, is_kept: Tensor
    ) -> Tensor:
        """[G] bool: the groups of `is_kept` without an unfinished episode whose environment cannot be replayed. Counts
        the others as dropped."""
        own = torch.tensor([episode.end is None and not episode.replayable for episode in episodes], dtype=torch.int64)
        stuck = self.role_groups.gather_rows(sequence_ids, own, groups.count)
        is_stuck = groups.reduce(stuck, "amax") > 0
        self.dropped += int((is_stuck & is_kept).sum())
        return is_kept & ~is_stuck

    def _keep(self, batch: Batch, episodes: list[Episode], requests: list[PromptRequest], is_kept: Tensor):
        """Keeps this replica's share of the kept groups ([G] bool) and tells the other replicas which one has which."""
        role_groups, groups = self.role_groups, groups_of(requests)
        kept, is_kept_id = Batch(**{name: getattr(batch, name).cpu() for name in self._fields}), groups.expand(is_kept)
        episodes = list(itertools.compress(episodes, is_kept_id[kept.sequence_ids].tolist()))
        kept = kept.renumbered(is_kept_id)
        requests, groups = [requests[i] for i in is_kept.nonzero().flatten().tolist()], groups.kept(is_kept)
        ended = None
        if self.episodes is not None:
            ended = [episode.end is not None for episode in episodes]
            for episode, versions in zip(episodes, kept.versions.split(kept.lengths.tolist()), strict=True):
                episode.learn_versions(versions.tolist())
        own = torch.cat([_known(kept, ended), torch.full((len(kept), 1), role_groups.dp_rank)], 1)
        known = role_groups.gather_rows(kept.sequence_ids, own, groups.count)
        self._groups = _carried_groups(requests, known, kept) + self._groups

    def metrics(self) -> dict[str, int]:
        """Groups carried to the next step, and groups dropped in this one."""
        dropped, self.dropped = self.dropped, 0
        return {"rollout/carried_groups": len(self), "rollout/dropped_groups": dropped}

    def to_record(self) -> Record | None:
        """This replica's state for `load`, on its leader; None on other ranks or without responses."""
        responses = self.rows
        if not self.role_groups.is_leader or not len(responses):
            return None
        groups = [(each.line, each.draw_index, each.step, each.samples) for each in self.requests]
        facts: dict[str, Any] = {"groups": groups}
        if self.episodes is not None:
            keys = episode_keys(self.requests)
            facts["episodes"] = self.episodes.facts(keys[i] for i in responses.sequence_ids.tolist())
        return Record(facts, {name: getattr(responses, name) for name in responses.present()})

    def load(self, records: Iterable[Record]):
        """Loads the groups of a checkpoint, from a record of each replica that saved one, assigned round-robin to the
        present replicas. UsageError for too small length limits."""
        s, role_groups, limit = self.settings, self.role_groups, self.settings.max_response_length
        own: list[Batch] = []
        known, prompt, response = torch.empty(0), 0, 0
        for facts, fields in records:
            requests = [PromptRequest(line, (), n, limit, step, index) for line, index, step, n in facts["groups"]]
            groups, batch, ended = groups_of(requests), Batch(**fields), None
            known = known if own else torch.zeros(groups.count, 4, dtype=torch.int64)  # of all replicas
            dp_ranks = groups.round_robin(len(role_groups.replicas))[batch.sequence_ids]
            if self.episodes is not None:
                keys = episode_keys(requests)
                keys = [keys[i] for i in batch.sequence_ids.tolist()]
                ended = self.episodes.load(facts["episodes"], batch, keys, dp_ranks == role_groups.dp_rank)
            known[batch.sequence_ids] = torch.cat([_known(batch, ended), dp_ranks.unsqueeze(1)], 1)
            own.append(own_share(batch, groups, role_groups))
            # The rows of an agent together may fill the room of the longest prompt, too.
            prompts = batch.prompt_lengths if ended is None else batch.prompt_lengths.clamp(min=s.max_prompt_length)
            prompt = max([prompt, *batch.prompt_lengths.tolist()])
            response = max([response, *(batch.lengths - prompts).tolist()])
        if prompt > s.max_prompt_length or response > s.max_response_length:
            raise UsageError(
                f"--load: the checkpoint holds unfinished groups with prompts of up to {prompt} and responses of up to "
                f"{response} tokens; raise --max-prompt-length and --max-response-length to at least these"
            )
        self._groups = _carried_groups(requests, known, concatenate(own))


def _carried_groups(requests: list[PromptRequest], known: Tensor, rows: Batch) -> list[CarriedGroup]:
    """The groups of requests. `known`: [N, 4] length, has ended, oldest version, dp rank of each response; `rows`: this
    replica's, numbered as `known`."""
    found, first = [], 0
    for request in requests:
        ids = range(first, first + request.samples)
        lengths, ended, oldest, dp_ranks = known[ids.start : ids.stop].T.tolist()
        so_far = tuple(None if is_one else n for n, is_one in zip(lengths, ended, strict=True))
        own = rows.select(((rows.sequence_ids >= first) & (rows.sequence_ids < ids.stop)).nonzero().flatten())
        own.sequence_ids -= first
        carried = request._replace(tokens=(), lengths=so_far, dp_rank=dp_ranks[0], responses=())
        found.append(CarriedGroup(carried, min(oldest), own if len(own) else None))
        first = ids.stop
    return found


def _known(batch: Batch, ended: Sequence[bool] | None) -> Tensor:
    """[N, 3] int64 response length, has ended, oldest version of each sequence; `ended`: of episodes, which know their
    room themselves and have length 0; None: those that are `finished`."""
    finished = batch.finished if ended is None else torch.tensor(ended, dtype=torch.bool)
    token_ids = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)[batch.response_mask]
    oldest = torch.full((len(batch),), NO_TOKEN)
    oldest = oldest.scatter_reduce(0, token_ids, batch.versions[batch.response_mask].long(), "amin")
    lengths = batch.lengths - batch.prompt_lengths if ended is None else torch.zeros_like(oldest)
    return torch.stack([lengths, finished.long(), oldest], 1)
