"""A replica's batch: cut to a number of new tokens, and its share of groups."""

import torch

from megarl.batch import Batch
from megarl.rollout.replica_batch import forced_responses, truncated_to


def batch() -> Batch:
    """Prompts of 1, 2 and 1 tokens with responses of 3, 1 and 4, all finished; one token is forced."""
    lengths, prompts = torch.tensor([4, 3, 5]), torch.tensor([1, 2, 1])
    mask = [False, True, True, True, False, False, True, False, True, True, False, True]
    return Batch(
        sequence_ids=torch.arange(3), lengths=lengths, prompt_lengths=prompts, finished=torch.ones(3).bool(),
        tokens=torch.arange(12), response_mask=torch.tensor(mask),
    )  # fmt: skip


def test_responses_are_cut_to_their_new_tokens():
    """The last one had two tokens before: it keeps these, and as many new ones as the others."""
    found = truncated_to(batch(), 1, torch.tensor([0, 0, 2]))
    assert found.lengths.tolist() == [2, 3, 4] and found.finished.tolist() == [False, True, False]
    assert found.tokens.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert truncated_to(batch(), 3, torch.zeros(3).long()).finished.tolist() == [True, True, False]


def test_responses_with_forced_tokens_are_counted():
    found = batch()
    assert forced_responses(found) == 1
    found.forced = torch.zeros(12).bool()
    assert forced_responses(found) == 0, "of an environment: what is not in the mask may be an answer"
    found.forced[[2, 10, 11]] = True
    assert forced_responses(found) == 2
