"""From prompts to the engine's requests, and from its completions to a packed batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.batch import Batch
from megarl.mcore import device
from megarl.mcore.engine import Completion, Request
from megarl.rollout.random import stream_keys


class Drawn(NamedTuple):
    """A prompt to be answered."""

    line: int  # in its file
    tokens: list[int]
    again: int = 0  # times that the same step drew this line before


def build_requests(
    ids: Tensor, prompts: list[Drawn], samples: int, seed: int, step: int, max_new_tokens: int
) -> list[Request]:
    """One request for each sequence id [N]; id i is sample i mod `samples` of prompt i div `samples`.

    The random stream is named by the prompt's line in its file, not by its place in the step; a line that a step
    draws again goes on with the samples behind those that it has.
    """
    drawn = [prompts[place] for place in (ids // samples).tolist()]
    lines = torch.tensor([prompt.line for prompt in drawn], dtype=torch.int64)
    before = torch.tensor([prompt.again * samples for prompt in drawn], dtype=torch.int64)
    keys = stream_keys(seed, step, lines, before + ids % samples).tolist()
    return [Request(prompt.tokens, key, max_new_tokens) for prompt, key in zip(drawn, keys, strict=True)]


def pack_completions(
    ids: Tensor, prompts: list[Drawn], samples: int, requests: list[Request], completions: list[Completion],
    no_routes: Tensor | None = None,
) -> Batch:  # fmt: skip
    """The rollout of a lane as one packed batch, in ascending sequence ids.

    `no_routes` [0, L, k]: the shape of the routes that the completions have; None: they have none.
    """
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
