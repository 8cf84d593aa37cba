"""From prompts to the engine's requests, and from its completions to a packed batch."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.counter_rng import stream_keys
from megarl.batch import Batch
from megarl.mcore import device
from megarl.mcore.inference.engine import Completion, GenerationRequest


class PartialResponse(NamedTuple):
    """What there is of a response that goes on."""

    tokens: list[int] = []
    is_finished: bool = False  # its end token was written

    def remaining(self, limit: int) -> int:
        """Tokens that can come behind it in a response of at most `limit`."""
        return 0 if self.is_finished else limit - len(self.tokens)


class PromptRequest(NamedTuple):
    """A prompt to be answered."""

    line: int  # in its file
    tokens: list[int]
    again: int = 0  # times that the same step drew this line before
    step: int | None = None  # that drew it; None: the one that has it answered
    partial: tuple[PartialResponse, ...] = ()  # of all its responses, in their order, where they were begun before


def build_requests(
    ids: Tensor, prompts: list[PromptRequest], samples: int, seed: int, step: int, max_new_tokens: int
) -> list[GenerationRequest]:
    """One request for each sequence id [N]; id i is sample i mod `samples` of prompt i div `samples`.

    The random stream is named by the prompt's line in its file and by the step that drew it, not by its place in the
    step; a line that a step draws again goes on with the samples behind those that it has. A response that was begun
    before goes on behind its part, which the engine reads like a prompt; one with `max_new_tokens` 0 is whole.
    """
    drawn = [prompts[place] for place in (ids // samples).tolist()]
    lines = torch.tensor([prompt.line for prompt in drawn], dtype=torch.int64)
    streams = torch.tensor([prompt.again * samples for prompt in drawn], dtype=torch.int64) + ids % samples
    steps = torch.tensor([step if prompt.step is None else prompt.step for prompt in drawn], dtype=torch.int64)
    keys = torch.empty_like(lines)
    for each in steps.unique().tolist():
        mine = steps == each
        keys[mine] = stream_keys(seed, each, lines[mine], streams[mine])
    return [
        GenerationRequest(prompt.tokens + part.tokens, key, part.remaining(max_new_tokens))
        for prompt, key, part in zip(drawn, keys.tolist(), partial_responses_of(ids, prompts, samples), strict=True)
    ]


def partial_responses_of(ids: Tensor, prompts: list[PromptRequest], samples: int) -> list[PartialResponse]:
    """What there was of each sequence before it was asked for; ids as in `build_requests`."""
    nothing = (PartialResponse(),) * samples
    return [(prompts[i // samples].partial or nothing)[i % samples] for i in ids.tolist()]


def skip_if_enough_are_finished(
    requests: list[GenerationRequest], samples: int, wanted: int
) -> list[GenerationRequest]:
    """What is to be written where `wanted` groups are: nothing when so many are whole already."""
    is_open = torch.tensor([request.max_new_tokens > 0 for request in requests]).view(-1, samples).any(1)
    if len(is_open) - int(is_open.sum()) < wanted:
        return requests
    return [dataclasses.replace(request, max_new_tokens=0) for request in requests]


def completions_to_batch(
    done: dict[int, Completion], prompts: list[PromptRequest], samples: int, requests: list[GenerationRequest],
    no_routes: Tensor | None = None,
) -> Batch:  # fmt: skip
    """What a lane wrote as one packed batch, in ascending sequence ids.

    Args:
        done: by sequence id.
        prompts, samples, requests: of all lanes, as of `build_requests`.
        no_routes: [0, L, k], the shape of the routes that the completions have; None: they have none.
    """
    ids = torch.tensor(sorted(done), dtype=torch.int64)
    requests, completions = [requests[i] for i in sorted(done)], [done[i] for i in sorted(done)]
    tokens, mask, logprobs = [], [], []
    for request, completion in zip(requests, completions, strict=True):
        prompt, written = len(request.prompt), len(completion.tokens)
        tokens += request.prompt + completion.tokens
        mask += [False] * prompt + [True] * written
        logprobs += [0.0] * prompt + completion.logprobs
    batch = Batch(
        sequence_ids=ids,
        prompt_ids=torch.tensor([prompts[place].line for place in (ids // samples).tolist()], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(r.prompt) for r in requests], dtype=torch.int64),
        finished=torch.tensor([c.finished for c in completions], dtype=torch.bool),
        lengths=torch.tensor(
            [len(r.prompt) + len(c.tokens) for r, c in zip(requests, completions, strict=True)], dtype=torch.int64
        ),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        routes=None if no_routes is None else torch.cat([no_routes, *(c.routes for c in completions)]),
    )
    return batch.to(device.device())
