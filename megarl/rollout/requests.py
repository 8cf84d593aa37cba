"""The responses of a round: from prompts to requests of the engine, and from its answers to a packed batch; what ends a
response, and its thoughts."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings, stream_keys
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.detokenizer import StopMatcher, Vocabulary
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.flags.fields import parse_ints
from megarl.flags.generation_flags import parse_stops
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.mcore.inference.generation import Completion, GenerationRequest, Response, Span, Trunk
from megarl.mcore.moe.routes import NO_ROUTE
from megarl.rollout.episodes.episode import key_of
from megarl.tool_formats.chosen_format import load_format, name_of
from megarl.tool_formats.thinking_budget import ThinkingBudget, ThoughtReader


class PromptRequest(NamedTuple):
    """A prompt for which a group of responses is requested."""

    line: int  # in the prompt set
    tokens: Sequence[int]  # () on replicas that do not hold the group's responses
    samples: int  # responses
    limit: int  # tokens of a response
    step: int  # that has drawn the line
    draw_index: int = 0  # how often the same step has drawn this line before
    # Of a group that is continued, what each sample has: tokens, None if it has ended. Episodes know their room
    # themselves, and have 0. Empty: a new group.
    lengths: tuple[int | None, ...] = ()
    dp_rank: int | None = None  # replica that holds these responses and continues them; None: any replica
    responses: tuple[Response, ...] = ()  # on that replica, without those of episodes

    @property
    def remaining(self) -> list[int]:
        """Tokens that each response may still get."""
        return [0 if n is None else self.limit - n for n in self.lengths or (0,) * self.samples]

    @property
    def held(self) -> Sequence[Response | None]:
        """Of each sample, the response that this replica continues; None: it begins, or is another replica's."""
        return self.responses or (None,) * self.samples


# How the episodes of a group share their first turns: turns that are shared, consecutive samples that share them.
Branching = tuple[int, int]
NO_BRANCHES: Branching = 0, 1


def branching_of(settings: Settings) -> Branching:
    """Of `--branch-turns`."""
    return (settings.branch_turns, settings.branch_samples) if settings.branch_turns else NO_BRANCHES


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
    return [room for prompt in prompts for room in prompt.remaining]


def earlier_responses(prompts: Iterable[PromptRequest]) -> list[Response | None]:
    """The response of an earlier round that each sequence id continues, of those that this replica holds."""
    return [response for prompt in prompts for response in prompt.held]


class RoundRequests:
    """The requests of a round by sequence id, which `groups` counts.

    Every rank knows how long each response may get; a request is built on the replica that takes it.
    """

    def __init__(
        self,
        prompts: list[PromptRequest],
        seed: int,
        step: int,
        thinking: ThinkingBudget | None = None,
        branching: Branching = NO_BRANCHES,
        prompt_set: PromptSet | None = None,
    ):
        """`prompts`: of all replicas; `step`: the one that generates; `thinking`: the budget of each response, or turn;
        `branching`: of episodes; `prompt_set`: the set whose lines the prompts are, for environments."""
        self.prompts, self.groups = prompts, groups_of(prompts)
        ends = self.groups.sizes.cumsum(0).tolist()
        self._ids = list(map(range, [0, *ends], ends))  # of each group
        self.group_of: list[int] = self.groups.of(torch.arange(self.groups.count)).tolist()  # each response
        self.thinking, self.prompt_set = thinking, prompt_set
        self._branch_turns, self._branch_samples = branching
        self._seed, self.step = seed, step
        self.limits = remaining_tokens(prompts)  # 0: the response is finished
        self.responses: dict[int, Response] = {}  # that this replica has begun, or goes on with, by id

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
        return self.limits[i] > 0

    def assigned_to(self, dp_rank: int, replicas: int) -> list[int]:
        """Ids of a replica if there is no shared queue: groups that it continues, a round-robin share of the others."""
        owners = (group % replicas if p.dp_rank is None else p.dp_rank for group, p in enumerate(self.prompts))
        groups = [group for group, owner in enumerate(owners) if owner == dp_rank]
        return [i for group in groups for i in self._ids[group]]

    def _response(self, i: int, key: int, trunk: Trunk | None) -> Response:
        prompt = self.prompt_of(i)
        held = prompt.held[self.sample_of(i)]
        asked = GenerationRequest([*prompt.tokens], key, prompt.limit, thinking=self.thinking, trunk=trunk)
        if held is None:
            return Response(asked)
        spans = [span._replace(tokens=[*span.tokens], logprobs=[*span.logprobs]) for span in held.spans]
        return dataclasses.replace(held, asked=asked, spans=spans, before=held.length)

    def take(self, i: int, completion: Completion, version: int | None) -> Response:
        """Takes in what the engine has answered to a request, with forced tokens apart. `version`: of its policy."""
        response, (tokens, logprobs) = self.responses[i], (completion.tokens, completion.logprobs)
        start, forced = response.length, range(0)
        if self.thinking is not None:
            forced = self.thinking.forced(response.asked.prompt, [*response.tokens, *tokens])
        first, last = (min(max(edge - start, 0), len(tokens)) for edge in (forced.start, forced.stop))
        for part, is_forced in ((slice(first), False), (slice(first, last), True), (slice(last, None), False)):
            response.add(tokens[part], logprobs[part], version, is_forced)
        response.finished, response.routes = completion.finished, completion.routes
        return response

    def stream_of(self, i: int) -> int:
        """The number of a response among all that its step draws of the prompt's line."""
        prompt = self.prompt_of(i)  # all groups of the line have its size
        return prompt.draw_index * prompt.samples + self.sample_of(i)

    def trunk_of(self, i: int) -> int:
        """The stream that names the random numbers of a response's first turns, if episodes share these; else its
        own."""
        return self.stream_of(i) - self.sample_of(i) % self._branch_samples

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
        if not self._branch_turns:
            return [None] * len(ids)
        return [Trunk(key, self._branch_turns) for key in self._keys(ids, [self.trunk_of(i) for i in ids])]

    def build(self, ids: Sequence[int]) -> list[GenerationRequest]:
        """The requests of these ids, which this replica continues or any may take; `responses` has them from now on.

        The random stream of a response is keyed by the prompt's line, the step that drew it, and the sample, so it does
        not depend on the order of prompts in the step. If a step draws a line again, its samples use the next streams.
        """
        keys = self._keys(ids, [self.stream_of(i) for i in ids])
        made = zip(ids, keys, self._trunks(ids), strict=True)
        self.responses |= {i: self._response(i, key, trunk) for i, key, trunk in made}
        return [self.responses[i].request(self.limits[i]) for i in ids]

    def to_batch(self, empty_routes: Tensor | None = None, version: int | None = None) -> Batch:
        """The replica's `responses` of the round, continued ones from their beginning, in ascending order of ids.

        Args:
            empty_routes: [0, L, k] routes of no tokens; None if none are recorded. Those of a response that has got no
                token, or has not ended, are unknown: a later round reads it again.
            version: of the policy that has read the new prompts; None: the batch has no versions.
        """
        ids = sorted(self.responses)
        responses = [self.responses[i] for i in ids]
        for response in responses:
            response.prompt_weights = version if response.prompt_weights is None else response.prompt_weights
        batch = responses_to_batch(responses, has_versions=version is not None)
        batch.sequence_ids = torch.tensor(ids, dtype=torch.int64)
        batch.prompt_ids = torch.tensor([self.prompt_of(i).line for i in ids], dtype=torch.int64)
        if empty_routes is not None:
            unknown = (unknown_routes(empty_routes, len(r.row)) if r.routes is None else r.routes for r in responses)
            batch.routes = torch.cat([empty_routes, *unknown])
        return batch.to(device.device())


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


def responses_to_batch(responses: Sequence[Response], has_versions: bool) -> Batch:
    """Prompts and responses as a packed batch, without what says whose they are. Forced tokens are not in the mask."""
    spans, are_prompts = [], []
    for response in responses:
        spans += [Span(response.prompt_weights, response.asked.prompt, []), *response.spans]
        are_prompts += [True, *[False] * len(response.spans)]
    counts = np.array([len(span.tokens) for span in spans], np.int64)

    def of_tokens(values: list, dtype) -> np.ndarray:
        return np.repeat(np.array(values, dtype), counts)

    is_prompt, logprobs = of_tokens(are_prompts, bool), np.zeros(counts.sum(), np.float32)
    logprobs[~is_prompt] = _joined([span.logprobs for span in spans], np.float32)
    is_forced = of_tokens([span.is_forced for span in spans], bool)
    versions = of_tokens([span.weights for span in spans], np.int32) if has_versions else None
    lengths = [(len(r.asked.prompt), len(r.asked.prompt) + r.length) for r in responses]
    return Batch(
        prompt_lengths=torch.tensor([prompt for prompt, _ in lengths], dtype=torch.int64),
        finished=torch.tensor([response.finished for response in responses], dtype=torch.bool),
        lengths=torch.tensor([length for _, length in lengths], dtype=torch.int64),
        tokens=torch.from_numpy(_joined([span.tokens for span in spans], np.int64)),
        rollout_logprobs=torch.from_numpy(logprobs),
        response_mask=torch.from_numpy(~(is_prompt | is_forced)),
        versions=None if versions is None else torch.from_numpy(versions),
    )


def batch_to_responses(batch: Batch) -> list[Response]:
    """The responses of a batch with versions, each with its prompt alone as what was asked. On the host."""
    found, bounds = [], batch.cu_seqlens.tolist()
    tokens, logprobs, mask = batch.tokens.tolist(), batch.rollout_logprobs.tolist(), batch.response_mask.tolist()
    versions = batch.versions.tolist()
    rows = zip(bounds, bounds[1:], batch.prompt_lengths.tolist(), batch.finished.tolist(), strict=False)
    for start, end, length, finished in rows:
        first = start + length
        response = Response(GenerationRequest(tokens[start:first], key=0, max_new_tokens=end - first))
        response.prompt_weights = versions[start] if length else None
        columns = zip(*(column[first:end] for column in (versions, mask, tokens, logprobs)), strict=True)
        for (version, chosen), items in itertools.groupby(columns, operator.itemgetter(0, 1)):
            same = list(items)
            response.add([row[2] for row in same], [row[3] for row in same], version, not chosen)
        response.finished = finished
        found.append(response)
    return found


def dp_assignment_of(batch: Batch | None, count: int, role_groups: RoleGroups) -> Tensor:
    """[count] int64: dp rank that generated each sequence, on the rollout's ranks; zeros elsewhere, where nothing
    depends on it. `batch`: this rank's share. A collective of the rollout."""
    if batch is None or len(role_groups.replicas) == 1:
        return torch.zeros(count, dtype=torch.int64)
    dp_ranks = torch.full_like(batch.sequence_ids, role_groups.dp_rank)
    return role_groups.gather_rows(batch.sequence_ids, dp_ranks, count)


# -- what ends a response ----------------------------------------------------------------------------------------------


class ResponseEnds:
    """What ends a response besides its length."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.own_ids = () if settings.stop_token_ids is None else parse_ints(settings.stop_token_ids)
        self.ids = tuple(dict.fromkeys((*tokenizer.end_ids, *self.own_ids)))
        self.stops = () if settings.stop is None else parse_stops(settings.stop)
        self.matcher = StopMatcher(tokenizer, self.stops) if self.stops else None
        self.identity = self.ids, self.stops  # of responses that a bank keeps


def check_ends(settings: Settings, tokenizer: Tokenizer):
    """UsageError for tokens that the tokenizer does not have."""
    unknown = [number for number in ResponseEnds(settings, tokenizer).own_ids if number >= tokenizer.vocab_size]
    if unknown:
        raise UsageError(
            f"--stop-token-ids {settings.stop_token_ids}: allowed are ids below {tokenizer.vocab_size}, the size of the"
            " tokenizer's vocabulary"
        )


def thinking_budget_of(settings: Settings, encoder: Encoder) -> ThinkingBudget | None:
    """The budget of the flags; None without one. `encoder`: the policy's.

    UsageError for a text that does not end its thoughts, or a budget that leaves no room for an answer.
    """
    s, limit = settings, settings.thinking_budget
    if limit is None:
        return None
    reader = ThoughtReader(Vocabulary(encoder.tokenizer), load_format(name_of(s.tool_call_parser, encoder.template)))
    given = s.thinking_budget_text
    text = reader.default_text if given is None else given
    try:
        tokens = reader.encode(text)
    except ValueError as error:
        where = f"--thinking-budget {limit}: " if given is None else "--thinking-budget-text: "
        raise UsageError(f"{where}{error}") from None
    longest, flag = s.max_response_length, "--max-response-length"
    if s.environment is not None and s.max_turn_length is not None:
        longest, flag = s.max_turn_length, "--max-turn-length"
    if limit + len(tokens) >= longest:
        raise UsageError(
            f"--thinking-budget {limit}: with the {len(tokens)} tokens that end thoughts, {flag} {longest} leaves no"
            " room for an answer"
        )
    return ThinkingBudget(limit, text, tokens, reader)
