"""Converts prompts to requests of the engine, and its completions to a packed batch."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.counter_rng import stream_keys
from megarl.batch import Batch
from megarl.mcore import device
from megarl.mcore.inference.engine import Completion, GenerationRequest


class PartialResponse(NamedTuple):
    """The first tokens of a response, generated in an earlier step."""

    tokens: list[int] = []
    is_finished: bool = False  # ends with the end token

    def remaining(self, limit: int) -> int:
        """Tokens that can still be generated if a response has at most `limit` tokens."""
        return 0 if self.is_finished else limit - len(self.tokens)


class PromptRequest(NamedTuple):
    """A prompt for which a group of responses is requested."""

    line: int  # in the prompt set
    tokens: Sequence[int]
    draw_index: int = 0  # how often the same step has drawn this line before
    step: int | None = None  # step that drew the line; None: the step that generates
    partial: tuple[PartialResponse, ...] = ()  # one for each sample, to be continued; empty: a new group


def build_requests(
    ids: Tensor, prompts: list[PromptRequest], samples: int, seed: int, step: int, max_new_tokens: int
) -> list[GenerationRequest]:
    """One request for each sequence id [N]; id i is sample i mod `samples` of prompt i div `samples`.

    The random stream of a response is keyed by the prompt's line, the step that drew it, and the sample, so it does not
    depend on the order of prompts in the step. If a step draws a line again, its samples use the next streams. A
    partial response is appended to the prompt, and the engine continues it; `max_new_tokens` is 0 if it is finished.
    """
    of_ids = [prompts[i] for i in (ids // samples).tolist()]
    lines = torch.tensor([prompt.line for prompt in of_ids], dtype=torch.int64)
    streams = torch.tensor([prompt.draw_index * samples for prompt in of_ids], dtype=torch.int64) + ids % samples
    steps = torch.tensor([step if prompt.step is None else prompt.step for prompt in of_ids], dtype=torch.int64)
    keys = torch.empty_like(lines)
    for drawn_in in steps.unique().tolist():
        is_of_step = steps == drawn_in
        keys[is_of_step] = stream_keys(seed, drawn_in, lines[is_of_step], streams[is_of_step])
    partial = partial_responses_of(ids, prompts, samples)
    return [
        GenerationRequest([*prompt.tokens, *response.tokens], key, response.remaining(max_new_tokens))
        for prompt, key, response in zip(of_ids, keys.tolist(), partial, strict=True)
    ]


def partial_responses_of(ids: Tensor, prompts: list[PromptRequest], samples: int) -> list[PartialResponse]:
    """The partial response of each sequence id, empty in a new group; ids as in `build_requests`."""
    empty = (PartialResponse(),) * samples
    return [(prompts[i // samples].partial or empty)[i % samples] for i in ids.tolist()]


def skip_if_enough_are_finished(
    requests: list[GenerationRequest], samples: int, wanted: int
) -> list[GenerationRequest]:
    """The requests unchanged, or all with `max_new_tokens` 0 if at least `wanted` groups are finished already."""
    is_open = torch.tensor([request.max_new_tokens > 0 for request in requests]).view(-1, samples).any(1)
    if len(is_open) - int(is_open.sum()) < wanted:
        return requests
    return [dataclasses.replace(request, max_new_tokens=0) for request in requests]


def completions_to_batch(
    done: dict[int, Completion], prompts: list[PromptRequest], samples: int, requests: list[GenerationRequest],
    empty_routes: Tensor | None = None,
) -> Batch:  # fmt: skip
    """The completions of a replica as a packed batch, in ascending order of sequence ids.

    Args:
        done: completions by sequence id.
        prompts, samples, requests: of all replicas, as in `build_requests`.
        empty_routes: [0, L, k] routes of no tokens; None if the completions have no routes.
    """
    ids = torch.tensor(sorted(done), dtype=torch.int64)
    requests, completions = [requests[i] for i in sorted(done)], [done[i] for i in sorted(done)]
    tokens, mask, logprobs = [], [], []
    for request, completion in zip(requests, completions, strict=True):
        tokens += request.prompt + completion.tokens
        mask += [False] * len(request.prompt) + [True] * len(completion.tokens)
        logprobs += [0.0] * len(request.prompt) + completion.logprobs
    lengths = [len(r.prompt) + len(c.tokens) for r, c in zip(requests, completions, strict=True)]
    batch = Batch(
        sequence_ids=ids,
        prompt_ids=torch.tensor([prompts[i].line for i in (ids // samples).tolist()], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(r.prompt) for r in requests], dtype=torch.int64),
        finished=torch.tensor([c.finished for c in completions], dtype=torch.bool),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        routes=None if empty_routes is None else torch.cat([empty_routes, *(c.routes for c in completions)]),
    )
    return batch.to(device.device())
