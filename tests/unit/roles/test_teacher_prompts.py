"""Batches in which a teacher reads other prompts: the responses stay whole, and their places are known in both."""

import torch

from megarl.batch import Batch
from megarl.roles.teacher_prompts import with_prompts


def test_responses_follow_other_prompts_and_their_places_are_known():
    lengths, prompts = [5, 3, 4], [2, 3, 1]  # the second has no response
    tokens = torch.arange(12)
    places = torch.cat([torch.arange(n) for n in lengths])
    mask = places >= torch.tensor(prompts).repeat_interleave(torch.tensor(lengths))
    batch = Batch(
        sequence_ids=torch.arange(3), lengths=torch.tensor(lengths), prompt_lengths=torch.tensor(prompts),
        prompt_ids=torch.tensor([7, 7, 8]), tokens=tokens, response_mask=mask, finished=torch.ones(3).bool(),
    )  # fmt: skip
    own = ([50, 51, 52], None, [60, 61]), torch.tensor([0, 1, 2])
    found, places, read = with_prompts(batch, own)
    assert found.tokens.tolist() == [50, 51, 52, 2, 3, 4, 5, 6, 7, 60, 61, 9, 10, 11]
    assert found.lengths.tolist() == [6, 3, 5] and found.prompt_lengths.tolist() == [3, 3, 2]
    assert found.prompt_ids.tolist() == [0, 1, 2] and found.response_lengths.tolist() == [3, 0, 3]
    assert torch.equal(batch.tokens[places], found.tokens[read]) and len(places) == int(mask.sum())
