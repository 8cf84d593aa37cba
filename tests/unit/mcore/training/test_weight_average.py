"""The moving average of a model's weights, against PyTorch's own."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megarl.mcore.training.weight_average import WeightAverage
from tests.helpers.tiers import long


def bits(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.9, long(0.25), long(0.999)])
def test_it_is_that_of_pytorch_and_leaves_the_model_as_it_was(decay, dtype):
    """To the bit, on weights in fp32; what is not trained is not averaged."""
    draw = torch.Generator().manual_seed(1)
    model = torch.nn.ModuleList([torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)]).to(dtype)
    model[1].bias.requires_grad_(False)
    average = WeightAverage(model, decay)
    wide = copy.deepcopy(model).float()
    oracle = AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(decay))
    oracle.update_parameters(wide)
    for _ in range(5):
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), wide.parameters(), strict=True):
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=draw).to(dtype)
                other.copy_(parameter)
        average.update()
        oracle.update_parameters(wide)
        before = bits(model)
        with average.in_model():
            inside = bits(model)
        assert all(map(torch.equal, bits(model), before))
        assert all(map(torch.equal, inside, [p.to(dtype) for p in oracle.module.parameters()]))
        assert not torch.equal(inside[0], before[0]) and torch.equal(inside[3], before[3])
    average.reset()
    with average.in_model():
        assert all(map(torch.equal, bits(model), before))


def test_the_model_gets_its_weights_back_after_a_failure():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    average, before = WeightAverage(model, 0.5), bits(model)
    with torch.no_grad():
        model[0].weight += 1
    average.update()
    with pytest.raises(ValueError, match="inside"), average.in_model():
        assert torch.allclose(model[0].weight, before[0] + 0.5)
        raise ValueError("inside")
    assert torch.equal(model[0].weight, before[0] + 1)
