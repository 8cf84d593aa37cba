"""Converts prompts to requests of the engine, and its completions to a packed batch."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings, stream_keys
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.mcore.inference.generation import Completion, GenerationRequest, Trunk
from megarl.mcore.moe.routes import NO_ROUTE
from megarl.rollout.episodes.episode import key_of
from megarl.tool_formats.thinking_budget import ThinkingBudget


class PartialResponse(NamedTuple):
    """The first tokens of a response, generated in an earlier step; only the replica that continues it has `tokens`."""

    length: int = 0
    is_finished: bool = False  # ends with the end token
    tokens: Sequence[int] = ()

    def remaining(self, limit: int) -> int:
        """Tokens that can still be generated if a response has at most `limit` tokens."""
        return 0 if self.is_finished else limit - self.length


class PromptRequest(NamedTuple):
    """A prompt for which a group of responses is requested."""

    line: int  # in the prompt set
    tokens: Sequence[int]  # () on replicas that do not hold the group's partial responses
    samples: int  # responses
    limit: int  # tokens of a response
    step: int  # that has drawn the line
    draw_index: int = 0  # how often the same step has drawn this line before
    partial: tuple[PartialResponse, ...] = ()  # one for each sample, to be continued; empty: a new group
    dp_rank: int | None = None  # replica that holds the partial responses and continues them; None: any replica


class Branching(NamedTuple):
    """How the episodes of a group share their first turns."""

    turns: int  # that are shared
    samples: int  # consecutive samples of a group that share them

    @classmethod
    def of(cls, settings: Settings) -> "Branching | None":
        """Of the flags; None without `--branch-turns`."""
        return cls(settings.branch_turns, settings.branch_samples) if settings.branch_turns else None


def groups_of(prompts: Iterable[PromptRequest]) -> PromptGroups:
    """The groups of responses to the prompts."""
    return PromptGroups([prompt.samples for prompt in prompts])


def episode_keys(prompts: Iterable[PromptRequest]) -> list[str]:
    """Keys of the episodes of the prompts, by sequence id."""
    return [
        key_of(prompt.step, prompt.line, prompt.draw_index * prompt.samples + sample)
        for prompt in prompts
        for sample in range(prompt.samples)
    ]


def remaining_tokens(prompts: Iterable[PromptRequest]) -> list[int]:
    """Tokens that each response to the prompts may still get, by sequence id."""
    return [
        response.remaining(prompt.limit)
        for prompt in prompts
        for response in prompt.partial or (PartialResponse(),) * prompt.samples
    ]


class RoundRequests:
    """The requests of a round by sequence id, which `groups` counts.

    Every rank knows how long each response may get; a request is built on the replica that takes it.
    """

    def __init__(
        self, prompts: list[PromptRequest], seed: int, step: int, thinking: ThinkingBudget | None = None,
        branching: Branching | None = None,
    ):  # fmt: skip
        """
        Args:
            prompts: of all replicas.
            step: the one that generates.
            thinking: the budget of each response, or turn; None: none.
            branching: of episodes; None: each has all of its turns for itself.
        """
        self.prompts, self.groups = prompts, groups_of(prompts)
        ends = self.groups.sizes.cumsum(0).tolist()
        self._ids = list(map(range, [0, *ends], ends))  # of each group
        self.group_of: list[int] = self.groups.of(torch.arange(self.groups.count)).tolist()  # each response
        self.thinking, self._branching = thinking, branching
        self._seed, self.step = seed, step
        self.limits = remaining_tokens(prompts)  # 0: the response is finished
        self.banked: list[bool] | None = None  # responses that some replica has from a bank; None: none

    def __len__(self) -> int:
        return len(self.limits)

    def skip_if_enough_are_finished(self, wanted: int):
        """Generates nothing if at least `wanted` groups are finished already."""
        if sum(not any(self.limits[i] for i in ids) for ids in self._ids) >= wanted:
            self.limits = [0] * len(self)

    def ids_of(self, group: int) -> range:
        """The responses to a prompt of the round."""
        return self._ids[group]

    def prompt_of(self, i: int) -> PromptRequest:
        """The prompt of a response."""
        return self.prompts[self.group_of[i]]

    def sample_of(self, i: int) -> int:
        """The number of a response in its group."""
        return i - self._ids[self.group_of[i]].start

    def is_open(self, i: int) -> bool:
        """Whether the engine has to generate a response."""
        return self.limits[i] > 0 and not (self.banked and self.banked[i])

    def bind(self, owners: dict[int, int]):
        """Has the replicas `owners` (by group) generate these groups."""
        self.prompts = [p._replace(dp_rank=owners.get(group, p.dp_rank)) for group, p in enumerate(self.prompts)]

    def assigned_to(self, dp_rank: int, replicas: int) -> list[int]:
        """Ids of a replica if there is no shared queue: groups that it continues, a round-robin share of the others."""
        owners = (group % replicas if p.dp_rank is None else p.dp_rank for group, p in enumerate(self.prompts))
        groups = [group for group, owner in enumerate(owners) if owner == dp_rank]
        return [i for group in groups for i in self._ids[group]]

    def partial(self, i: int) -> PartialResponse:
        """The partial response that is continued; empty in a new group."""
        partial = self.prompt_of(i).partial
        return partial[self.sample_of(i)] if partial else PartialResponse()

    def prompt(self, i: int) -> list[int]:
        """The prompt of a response, with the tokens of its partial response."""
        return [*self.prompt_of(i).tokens, *self.partial(i).tokens]

    def forced(self, i: int, new_tokens: Sequence[int]) -> range:
        """Places of forced tokens in a response: of those of its partial response and the new ones."""
        if self.thinking is None:
            return range(0)
        return self.thinking.forced(self.prompt_of(i).tokens, [*self.partial(i).tokens, *new_tokens])

    def stream_of(self, i: int) -> int:
        """The number of a response among all that its step draws of the prompt's line."""
        prompt = self.prompt_of(i)  # all groups of the line have its size
        return prompt.draw_index * prompt.samples + self.sample_of(i)

    def trunk_of(self, i: int) -> int:
        """The stream that names the random numbers of a response's first turns, if episodes share these; else its
        own."""
        shared = 0 if self._branching is None else self.sample_of(i) % self._branching.samples
        return self.stream_of(i) - shared

    def _keys(self, ids: Sequence[int], streams: Sequence[int]) -> list[int]:
        """The keys of random streams, each of a response's line in the step that drew it."""
        lines = torch.tensor([self.prompt_of(i).line for i in ids], dtype=torch.int64)
        numbers, steps = torch.tensor(streams, dtype=torch.int64), torch.tensor([self.prompt_of(i).step for i in ids])
        keys = torch.empty_like(lines)
        for drawn_in in steps.unique().tolist():
            is_of_step = steps == drawn_in
            keys[is_of_step] = stream_keys(self._seed, drawn_in, lines[is_of_step], numbers[is_of_step])
        return keys.tolist()

    def _trunks(self, ids: Sequence[int]) -> Sequence[Trunk | None]:
        if self._branching is None:
            return [None] * len(ids)
        return [Trunk(key, self._branching.turns) for key in self._keys(ids, [self.trunk_of(i) for i in ids])]

    def build(
        self, ids: Sequence[int], sampling: SamplingSettings | None = None, end_ids: tuple[int, ...] | None = None
    ) -> list[GenerationRequest]:
        """The requests of these ids, which this replica continues or any may take.

        The random stream of a response is keyed by the prompt's line, the step that drew it, and the sample, so it does
        not depend on the order of prompts in the step. If a step draws a line again, its samples use the next streams.
        `sampling`, `end_ids`: for a generator that serves others, too.
        """
        keys = self._keys(ids, [self.stream_of(i) for i in ids])
        return [
            GenerationRequest(
                prompt=self.prompt(i),
                key=key,
                max_new_tokens=self.limits[i],
                sampling=sampling,
                end_ids=end_ids,
                written=len(self.partial(i).tokens),
                thinking=self.thinking,
                trunk=trunk,
            )
            for i, key, trunk in zip(ids, keys, self._trunks(ids), strict=True)
        ]


def sampling_of(settings: Settings, temperature: float) -> SamplingSettings:
    """How tokens are drawn at a temperature; 0 is greedy."""
    s = settings
    return SamplingSettings(
        temperature=temperature or 1.0, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, greedy=temperature == 0
    )


def unknown_routes(empty_routes: Tensor, tokens: int) -> Tensor:
    """[tokens, L, k] routes that nobody has recorded. `empty_routes`: [0, L, k]."""
    return empty_routes.new_full((tokens, *empty_routes.shape[1:]), NO_ROUTE)


def _joined(lists: Sequence[Sequence], dtype) -> np.ndarray:
    """All numbers of some lists, one list after the other. torch.tensor of such a list takes ten times the time."""
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, sum(map(len, lists)))


def _mark_forced(mask: np.ndarray, sizes: np.ndarray, found: list[tuple[int, range]]):
    """Takes forced tokens out of the mask of new tokens.

    Args:
        mask: [T] of all rows.
        sizes: [n, 2] tokens of each row that the engine had as prompt, and new ones.
        found: of each row (tokens of its partial response, `RoundRequests.forced`).
    """
    first = 0
    for (before, new), (partial, forced) in zip(sizes.tolist(), found, strict=True):
        start = first + before  # of the new tokens
        mask[start + max(forced.start - partial, 0) : start + min(max(forced.stop - partial, 0), new)] = False
        first = start + new


def completions_to_batch(
    done: dict[int, Completion], requests: RoundRequests, empty_routes: Tensor | None = None,
    prompt_version: int | None = None,
) -> Batch:  # fmt: skip
    """The completions of a replica as a packed batch, in ascending order of sequence ids.

    Args:
        done: completions by sequence id.
        requests: of the round.
        empty_routes: [0, L, k] routes of no tokens; None if the completions have no routes.
        prompt_version: version that the tokens of prompts get; None if the versions are not known.
    """
    ids = sorted(done)
    completions, prompts = [done[i] for i in ids], [requests.prompt(i) for i in ids]
    sizes = np.array([(len(p), len(c.tokens)) for p, c in zip(prompts, completions, strict=True)], np.int64)
    sizes = sizes.reshape(-1, 2)  # also without completions
    is_new = np.repeat(np.tile([False, True], len(ids)), sizes.ravel())
    mask, logprobs = is_new.copy(), np.zeros(len(is_new), np.float32)
    logprobs[is_new] = _joined([c.logprobs for c in completions], np.float32)
    if requests.thinking is not None:
        _mark_forced(mask, sizes, [(len(requests.partial(i).tokens), requests.forced(i, done[i].tokens)) for i in ids])
    pairs = zip(prompts, (c.tokens for c in completions), strict=True)
    tokens = _joined(list(itertools.chain.from_iterable(pairs)), np.int64)
    versions = None
    if prompt_version is not None:
        versions = np.full(len(mask), prompt_version, np.int32)
        versions[is_new] = _joined([c.versions or () for c in completions], np.int32)
    lines = [requests.prompt_of(i).line for i in ids]
    batch = Batch(
        sequence_ids=torch.tensor(ids, dtype=torch.int64),
        prompt_ids=torch.tensor(lines, dtype=torch.int64),
        prompt_lengths=torch.from_numpy(sizes[:, 0].copy()),
        finished=torch.tensor([c.finished for c in completions], dtype=torch.bool),
        lengths=torch.from_numpy(sizes.sum(1)),
        tokens=torch.from_numpy(tokens),
        rollout_logprobs=torch.from_numpy(logprobs),
        response_mask=torch.from_numpy(mask),
        versions=None if versions is None else torch.from_numpy(versions),
        routes=None if empty_routes is None else torch.cat([empty_routes, *(c.routes for c in completions)]),
    )
    return batch.to(device.device())


def dp_assignment_of(batch: Batch | None, count: int, role_groups: RoleGroups) -> Tensor:
    """[count] int64: dp rank that generated each sequence, on the rollout's ranks; zeros elsewhere, where nothing
    depends on it. `batch`: this rank's share. A collective of the rollout."""
    if batch is None or len(role_groups.replicas) == 1:
        return torch.zeros(count, dtype=torch.int64)
    dp_ranks = torch.full_like(batch.sequence_ids, role_groups.dp_rank)
    return role_groups.gather_rows(batch.sequence_ids, dp_ranks, count)
