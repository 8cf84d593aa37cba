"""The record of scores: its rows, and the fields of a batch that it sets and is made from."""

import pytest
import torch

from megarl.arguments import Settings
from megarl.roles.scored import Scored, no_rows
from tests.helpers.models.batches import random_batch

PARTS = Settings(reward="format+length", advantage="gdpo")


@pytest.mark.parametrize("settings, parts", [(Settings(), 0), (PARTS, 2)])
def test_rows_give_the_record_back(settings, parts):
    found = Scored(
        torch.tensor([0.1, -2.0, float("nan")], dtype=torch.float64), torch.tensor([True, False, True]),
        torch.tensor([True, True, False]), torch.arange(3.0 * parts, dtype=torch.float64).reshape(3, parts),
    )  # fmt: skip
    rows = found.rows()
    assert rows.shape == no_rows(3, settings, "cpu").shape and rows.dtype == torch.float64
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(Scored.of_rows(rows), found, strict=True))
    assert not no_rows(3, settings, "cpu").any()


@pytest.mark.parametrize("drops", [False, True])
def test_a_batch_gets_its_scores_and_gives_them_back(drops):
    batch = random_batch(3, ["tokens", "response_mask", "prompt_lengths"], ids=torch.arange(3))
    mask, has_tokens = batch.response_mask.clone(), batch.response_lengths > 0
    found = Scored(torch.ones(3, dtype=torch.float64), has_tokens, torch.tensor([True, False, True]), torch.zeros(3, 2))
    found.fill(batch, drops)
    assert torch.equal(batch.correct, has_tokens) and batch.reward_parts.shape == (3, 2)
    assert torch.equal(batch.response_mask, mask) != (drops and bool(has_tokens[1]))
    again = Scored.of_batch(batch, Settings())
    assert torch.equal(again.counts, batch.response_lengths > 0) and torch.equal(again.reward, found.reward)
