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


def test_prompts_with_their_own_numbers_of_responses():
    """Three responses to the first prompt, two by default to the second, one to the third, which is continued."""
    partial = (PartialResponse(2, False, (50, 51)),)
    prompts = [
        PromptRequest(7, [1, 2, 3], samples=3, draw_index=2, limit=4), PromptRequest(4, [9], draw_index=1),
        PromptRequest(5, [8], samples=1, partial=partial),
    ]  # fmt: skip
    found = RoundRequests(prompts, 2, 1, 1, 6)
    assert found.limits == [4, 4, 4, 6, 6, 4] and found.groups.sizes.tolist() == [3, 2, 1]
    assert [found.group_of(i) for i in range(6)] == [0, 0, 0, 1, 1, 2]
    assert [found.sample_of(i) for i in range(6)] == [0, 1, 2, 0, 1, 0]
    assert [found.stream_of(i) for i in range(6)] == [6, 7, 8, 2, 3, 0], "streams of all draws of a line differ"
    assert found.prompt(5) == [8, 50, 51] and found.assigned_to(0, 2) == [0, 1, 2, 5]
    alone = [RoundRequests([prompt], 2, 1, 1, 6) for prompt in prompts]
    keys = [request.key for round_ in alone for request in round_.build(range(len(round_)))]
    assert [request.key for request in found.build(range(6))] == keys
    found.skip_if_enough_are_finished(1)
    assert found.limits == [4, 4, 4, 6, 6, 4], "none is finished"


def test_a_replica_without_completions_has_an_empty_batch():
    batch = completions_to_batch({}, requests(), ROUTES)
    assert all(len(getattr(batch, name)) == 0 for name in batch.present()) and "routes" in batch.present()
