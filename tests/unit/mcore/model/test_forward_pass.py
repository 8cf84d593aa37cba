"""A forward that scores the tokens of a mask only; evaluation mode for a while."""

import pytest
import torch

from megarl.mcore.model.forward_pass import eval_mode
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.tiny_models import VOCAB, build, ragged_tokens
from tests.helpers.worlds import on_each_rank


@on_each_rank()
def test_a_mask_leaves_its_tokens_scores_as_they_are_and_the_others_at_zero(rank):
    """Scores of a mask's tokens against those of all tokens, at a mask's edges."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, _, _ = build("", "llama")
    tokens, lengths = ragged_tokens([8, 1, 5, 3])
    generator = torch.Generator().manual_seed(3)
    first = torch.zeros(17, dtype=torch.bool)
    first[lengths.cumsum(0) - lengths] = True
    with inference_mode(model):
        whole = token_scores(model, tokens, lengths, 0.7, VOCAB)
        for share in (0.0, 0.1, 0.5, 1.0):
            mask = (torch.rand(17, generator=generator) < share) & ~first
            found = token_scores(model, tokens, lengths, 0.7, VOCAB, mask=mask)
            for all_of_them, some in zip(whole[:2], found[:2], strict=True):
                assert (some - all_of_them)[mask].abs().sum() <= 17 * largest_gap_allowed()
                assert torch.equal(some[~mask], torch.zeros(int((~mask).sum())))
        few = token_scores(model, tokens[:2], torch.tensor([2]), 0.7, VOCAB, mask=torch.tensor([False, True]))
        assert (few.logprobs - whole.logprobs[:2]).abs().max() <= largest_gap_allowed()


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_model_has_its_own_mode_afterwards_and_a_frozen_one_is_not_visited(is_trained, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Dropout()).train(is_trained)
    visits, change = [], torch.nn.Module.train
    monkeypatch.setattr(torch.nn.Module, "train", lambda self, mode=True: visits.append(mode) or change(self, mode))
    with pytest.raises(KeyError), eval_mode(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert all(module.training is is_trained for module in model.modules()) and bool(visits) is is_trained
