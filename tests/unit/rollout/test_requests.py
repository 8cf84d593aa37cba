"""Completions as a packed batch: every field in the order of sequence ids, with the bits of the completions."""

import torch

from megarl.mcore.inference.generation import Completion
from megarl.rollout.requests import PartialResponse, PromptRequest, RoundRequests, completions_to_batch

ROUTES = torch.zeros(0, 2, 1, dtype=torch.int16)


def requests() -> RoundRequests:
    """Two prompts with two samples each; the first sample of the second continues a response."""
    partial = PartialResponse(2, False, (50, 51)), PartialResponse()
    prompts = [PromptRequest(7, [1, 2, 3]), PromptRequest(4, [2**31, 9], partial=partial)]
    return RoundRequests(prompts, 2, 1, 1, 6)


def completion(tokens: list[int], logprobs: list[float], finished: bool, prompt: int) -> Completion:
    length = prompt + len(tokens)
    routes = torch.arange(2 * length, dtype=torch.int16).view(length, 2, 1)
    return Completion(tokens, logprobs, finished, routes)


def test_a_batch_has_the_numbers_of_its_completions():
    done = {
        2: completion([10, 11], [-0.1, -1 / 3], True, 4),
        0: completion([20], [-2.0000000001], False, 3),
        3: completion([], [], False, 2),
    }
    batch = completions_to_batch(done, requests(), ROUTES)
    assert batch.sequence_ids.tolist() == [0, 2, 3] and batch.prompt_ids.tolist() == [7, 4, 4]
    assert batch.prompt_lengths.tolist() == [3, 4, 2] and batch.lengths.tolist() == [4, 6, 2]
    assert batch.finished.tolist() == [False, True, False]
    assert batch.tokens.tolist() == [1, 2, 3, 20, 2**31, 9, 50, 51, 10, 11, 2**31, 9]
    assert batch.response_mask.tolist() == [False] * 3 + [True] + [False] * 4 + [True] * 2 + [False] * 2
    expected = torch.tensor([0, 0, 0, -2.0000000001, 0, 0, 0, 0, -0.1, -1 / 3, 0, 0], dtype=torch.float32)
    assert torch.equal(batch.rollout_logprobs, expected)
    assert torch.equal(batch.routes, torch.cat([done[i].routes for i in (0, 2, 3)]))
    kinds = {name: getattr(batch, name).dtype for name in batch.present()}
    assert kinds["tokens"] == kinds["lengths"] == kinds["prompt_lengths"] == torch.int64
    assert kinds["response_mask"] == torch.bool and kinds["rollout_logprobs"] == torch.float32


def test_a_replica_without_completions_has_an_empty_batch():
    batch = completions_to_batch({}, requests(), ROUTES)
    assert all(len(getattr(batch, name)) == 0 for name in batch.present()) and "routes" in batch.present()
