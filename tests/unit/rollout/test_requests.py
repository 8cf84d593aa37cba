"""Completions as a packed batch: every field in the order of sequence ids, with the bits of the completions."""

import itertools
from typing import NamedTuple

import pytest
import torch

from megarl.mcore.inference.generation import Completion, GenerationRequest, Response, Span
from megarl.rollout.requests import PromptRequest, RoundRequests, batch_to_responses, responses_to_batch
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import inputs
from tests.helpers.rollout.thinkers import TEXT, TURNS, thinking_argv

ROUTES = torch.zeros(0, 2, 1, dtype=torch.int16)


def carried(line: int, prompt: list[int], *tokens: list[int], limit: int = 6, draw_index: int = 0) -> PromptRequest:
    """A group that goes on with samples that have these tokens, of version 3; their log-probs are −5."""
    responses = tuple(Response(GenerationRequest(prompt, 0, 0), prompt_weights=2) for _ in tokens)
    for response, of_one in zip(responses, tokens, strict=True):
        response.add(of_one, [-5.0] * len(of_one), 3)
    lengths = tuple(map(len, tokens))
    return PromptRequest(line, prompt, len(tokens), limit, 1, draw_index, lengths, 0, responses)


def requests() -> RoundRequests:
    """Two prompts with two samples each; the first sample of the second continues a response."""
    return RoundRequests([PromptRequest(7, [1, 2, 3], 2, 6, 1), carried(4, [2**31, 9], [50, 51], [])], 1, 1)


def completion(tokens: list[int], logprobs: list[float], finished: bool, prompt: int) -> Completion:
    length = prompt + len(tokens)
    routes = torch.arange(2 * length, dtype=torch.int16).view(length, 2, 1)
    return Completion(tokens, logprobs, finished, routes)


def batch_of(done: dict[int, Completion], asked: RoundRequests, *args, version: int | None = None):
    """The batch of a replica that has taken the requests of these ids."""
    asked.build(list(done))
    for i, one in done.items():
        asked.take(i, one, version)
    return asked.to_batch(*args, version)


def test_a_batch_has_the_numbers_of_its_completions():
    done = {
        2: completion([10, 11], [-0.1, -1 / 3], True, 4),
        0: completion([20], [-2.0000000001], False, 3),
        3: completion([], [], False, 2),
    }
    batch = batch_of(done, requests(), ROUTES, version=7)
    assert batch.sequence_ids.tolist() == [0, 2, 3] and batch.prompt_ids.tolist() == [7, 4, 4]
    assert batch.prompt_lengths.tolist() == [3, 2, 2] and batch.lengths.tolist() == [4, 6, 2]
    assert batch.finished.tolist() == [False, True, False]
    assert batch.tokens.tolist() == [1, 2, 3, 20, 2**31, 9, 50, 51, 10, 11, 2**31, 9]
    assert batch.response_mask.tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 4 + [False] * 2
    expected = torch.tensor([0, 0, 0, -2.0000000001, 0, 0, -5, -5, -0.1, -1 / 3, 0, 0], dtype=torch.float32)
    assert torch.equal(batch.rollout_logprobs, expected)
    assert batch.versions.tolist() == [7] * 4 + [2, 2, 3, 3, 7, 7] + [2, 2]
    assert batch_of(done, requests(), ROUTES).versions is None
    assert torch.equal(batch.routes, torch.cat([done[i].routes for i in (0, 2, 3)]))
    kinds = {name: getattr(batch, name).dtype for name in batch.present()}
    assert kinds["tokens"] == kinds["lengths"] == kinds["prompt_lengths"] == torch.int64
    assert kinds["response_mask"] == torch.bool and kinds["rollout_logprobs"] == torch.float32


def test_prompts_with_their_own_numbers_of_responses():
    """Three responses to the first prompt, two to the second, one to the third, which is continued."""
    prompts = [
        PromptRequest(7, [1, 2, 3], 3, 4, 1, draw_index=2), PromptRequest(4, [9], 2, 6, 1, draw_index=1),
        carried(5, [8], [50, 51]),
    ]  # fmt: skip
    found = RoundRequests(prompts, 1, 1)
    assert found.limits == [4, 4, 4, 6, 6, 4] and found.groups.sizes.tolist() == [3, 2, 1]
    assert found.group_of == [0, 0, 0, 1, 1, 2]
    assert [found.sample_of(i) for i in range(6)] == [0, 1, 2, 0, 1, 0]
    assert [found.stream_of(i) for i in range(6)] == [6, 7, 8, 2, 3, 0], "streams of all draws of a line differ"
    assert found.assigned_to(0, 2) == [0, 1, 2, 5]
    alone = [RoundRequests([prompt], 1, 1) for prompt in prompts]
    keys = [request.key for round_ in alone for request in round_.build(range(len(round_)))]
    assert [request.key for request in found.build(range(6))] == keys and found.responses[5].row == [8, 50, 51]
    found.skip_if_enough_are_finished(1)
    assert found.limits == [4, 4, 4, 6, 6, 4], "none is finished"


def test_nothing_is_generated_once_enough_groups_are_complete():
    """Two of three groups have ended: one by its ends, one by its limit, too."""
    ended = carried(3, [5], [7, 1], [7, 1], limit=3)._replace(lengths=(None, None), step=4)
    cut = carried(2, [6], [7, 1], [7, 8, 9], limit=3, draw_index=1)._replace(lengths=(None, 3), step=4)
    found = RoundRequests([ended, cut, PromptRequest(1, [5, 6], 2, 3, 5)], seed=1, step=5)
    built = found.build(range(6))
    assert [request.prompt for request in built] == [[5, 7, 1]] * 2 + [[6, 7, 1], [6, 7, 8, 9]] + [[5, 6]] * 2
    assert [request.max_new_tokens for request in built] == found.limits == [0, 0, 0, 0, 3, 3]
    found.skip_if_enough_are_finished(3)
    assert found.limits == [0, 0, 0, 0, 3, 3]
    found.skip_if_enough_are_finished(2)
    assert found.limits == [0] * 6
    before = RoundRequests([PromptRequest(2, [6], 2, 3, 4, 1)], seed=1, step=4).build(range(2))
    assert [request.key for request in before] == [request.key for request in built[2:4]]


class _Rule(NamedTuple):
    """Forces two tokens after three of a response, unless it begins with 50."""

    limit = 3

    def forced(self, prompt, response):
        assert prompt in ([1, 2, 3], [8])
        return range(3, 5) if len(response) >= 3 and response[0] != 50 else range(0)


def test_forced_tokens_are_not_the_policys():
    """Rows cut before, within and after forced tokens, by the end of this round or of the last one."""
    for before, new in itertools.product(range(6), range(1, 6)):
        earlier = [*range(10, 10 + before)]
        prompts = [carried(7, [1, 2, 3], earlier, [50], limit=9), PromptRequest(8, [8], 2, 9, 1)]
        asked = RoundRequests(prompts, 1, 1, _Rule())
        rows = [range(10 + before, 10 + before + new), range(51, 51 + new), range(10, 10 + new), range(50, 50 + new)]
        done = {i: Completion([*row], [-1.0] * new, True) for i, row in enumerate(rows)}
        batch = batch_of(done, asked, None)
        masks = batch.response_mask.split(batch.lengths.tolist())
        expected = [[i not in (3, 4) for i in range(before, before + new)], [True] * new,
                    [i not in (3, 4) for i in range(new)], [True] * new]  # fmt: skip
        assert [mask.tolist()[-new:] for mask in masks] == expected
        # What an earlier round has written is as it was.
        assert [int(mask[:-new].sum()) for mask in masks] == [before, 1, 0, 0]
        assert batch.rollout_logprobs.sum() == -5 * (before + 1) - 4 * new  # the engine gives forced ones 0
        for i, request in enumerate(asked.build(range(4))):
            assert request.thinking == _Rule() and request.start == (3 if i < 2 else 1)


def test_responses_become_a_batch_and_come_back():
    """Prompts, spans of several policies and forced tokens, one without tokens; the weights of forced ones stay."""
    found = [Response(GenerationRequest(prompt, 0, 4), prompt_weights=3) for prompt in ([1, 2], [3], [4, 5, 6])]
    for tokens, version, is_forced in (([7, 8], 3, False), ([9], 3, True), ([10], 4, False)):
        found[0].add(tokens, [-token / 3 for token in tokens], version, is_forced)
    found[0].finished = True
    found[2].add([11], [0.0], 5, True)
    batch = responses_to_batch(found, has_versions=True)
    assert batch.response_mask.tolist() == [False, False, True, True, False, True, False, *[False] * 4]
    again = batch_to_responses(batch)
    assert [[(s.weights, s.tokens, s.is_forced) for s in r.spans] for r in again] == [
        [(3, [7, 8], False), (3, [9], True), (4, [10], False)], [], [(5, [11], True)]
    ]  # fmt: skip
    assert [(r.asked.prompt, r.finished, r.prompt_weights, r.chosen) for r in again] == [
        ([1, 2], True, 3, 3), ([3], False, 3, 0), ([4, 5, 6], False, 3, 0)
    ]  # fmt: skip
    same = responses_to_batch(again, has_versions=True)
    assert all(torch.equal(getattr(same, name), getattr(batch, name)) for name in batch.present())
    assert again[0].spans[2] == Span(4, [10], torch.tensor([-10 / 3]).tolist())


def test_a_replica_without_completions_has_an_empty_batch():
    batch = requests().to_batch(ROUTES)
    assert all(len(getattr(batch, name)) == 0 for name in batch.present()) and "routes" in batch.present()


@pytest.mark.parametrize(("flags", "says"), [
    (f"--thinking-budget 13 --thinking-budget-text {TEXT}",
     "--thinking-budget 13: with the 3 tokens that end thoughts, --max-response-length 16 leaves no room"),
    ("--thinking-budget-text +=", "--thinking-budget-text: needs </think>, with which this policy ends its thoughts"),
    (f"{TURNS} --thinking-budget 11", "--thinking-budget 11: with the 3 tokens that end thoughts, --max-turn-length"),
    ("--tool-call-parser mistral", "--thinking-budget-text: needs [/THINK], with which"),
    ("--tool-call-parser none", "--tool-call-parser none: "),
    ("--tokenizer-model {}", "--thinking-budget-text: its tokens do not end thoughts: they read"),
], ids=str)  # fmt: skip
def test_a_budget_that_cannot_work_is_refused(flags, says, tmp_path):
    assert says in refusal(thinking_argv(tmp_path / "none", flags.format(inputs() / "tokenizer.model")))
