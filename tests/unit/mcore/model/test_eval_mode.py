"""Evaluation mode for a while."""

import pytest
import torch

from megarl.mcore.model.eval_mode import eval_mode


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_model_has_its_own_mode_afterwards_and_a_frozen_one_is_not_visited(is_trained, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Dropout()).train(is_trained)
    visits, change = [], torch.nn.Module.train
    monkeypatch.setattr(torch.nn.Module, "train", lambda self, mode=True: visits.append(mode) or change(self, mode))
    with pytest.raises(KeyError), eval_mode(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert all(module.training is is_trained for module in model.modules()) and bool(visits) is is_trained
