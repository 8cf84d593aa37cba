"""Log-probs of token sequences that a client sends: the forward pass of training, over packed sequences."""

from typing import NamedTuple

import torch

from megarl.batch import Batch
from megarl.comm.microbatches import blank_sequences, build_microbatches
from megarl.mcore import device
from megarl.mcore.inference.generation import TopLogprobs
from megarl.mcore.model.forward_pass import top_scores
from megarl.roles.passes import forward_only


class SequenceScores(NamedTuple):
    """Log-prob of each token of a sequence, and the most likely tokens in its place; None for the first token."""

    logprobs: list[float | None]
    top_logprobs: list[TopLogprobs | None] | None  # None: not asked for


class ScoreRequest(NamedTuple):
    """A sequence to score under the temperature-scaled policy."""

    tokens: list[int]
    temperature: float
    top_logprobs: int


def together(requests: list[ScoreRequest], max_tokens: int) -> int:
    """How many of the first requests one pass scores: those with the first one's temperature, and at most
    `max_tokens` tokens if it is more than one."""
    tokens = 0
    for count, request in enumerate(requests):
        tokens += len(request.tokens)
        if count and (tokens > max_tokens or request.temperature != requests[0].temperature):
            return count
    return len(requests)


def score_sequences(model, pg_collection, vocab_size: int, requests: list[ScoreRequest]) -> list[SequenceScores]:
    """Scores sequences in one pass, with the bits that the rollout gives the same tokens.

    All ranks of a replica call it with the same requests, of the same temperature. Replicas that share experts call it
    together, those without requests with none.
    """
    if requests:
        lengths = torch.tensor([len(request.tokens) for request in requests])
        tokens = torch.tensor([token for request in requests for token in request.tokens])
        everything = torch.arange(len(requests))
        batch = Batch(sequence_ids=everything, lengths=lengths, tokens=tokens).to(device.device())
        microbatches = build_microbatches(batch, [everything])
    else:
        blank = blank_sequences(["sequence_ids", "tokens"], device.device())
        microbatches = [(blank, torch.zeros(0, dtype=torch.int64))]
    count = max((request.top_logprobs for request in requests), default=0)
    temperature = requests[0].temperature if requests else 1.0

    def forward(chunk, microbatch):
        return top_scores(chunk, microbatch.tokens, microbatch.host_metadata.lengths, temperature, vocab_size, count)

    (((logprobs, tokens, tops), _),) = forward_only(model, microbatches, forward, pg_collection)
    if not requests:
        return []
    rows = zip(*(values.cpu().split(lengths.tolist()) for values in (logprobs, tokens, tops)), strict=True)
    return [_scores(request, *row) for request, row in zip(requests, rows, strict=True)]


def _scores(request: ScoreRequest, logprobs, tokens, tops) -> SequenceScores:
    best = None
    if count := request.top_logprobs:
        rows = zip(tokens[1:, :count].tolist(), tops[1:, :count].tolist(), strict=True)
        best = [None, *(list(zip(*row, strict=True)) for row in rows)]
    return SequenceScores([None, *logprobs[1:].tolist()], best)
