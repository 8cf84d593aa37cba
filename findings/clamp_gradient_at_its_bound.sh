#!/usr/bin/env bash
# torch 2.14.1 (CPU): the gradient of clamp at its bound depends on how the bounds are given.
# Numbers as bounds: 0. Tensors as bounds, and minimum or maximum: 0.5. Inside it is 1.
# A ratio of exactly 1 + ε, or a log-ratio at its limit, thus trains by 0, by half or by all of its gradient.
# Output: clamp(3, 1, 3) 0.0; bounds as tensors 0.5; minimum 0.5; inside 1.0
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
"$PYTHON" - <<'PYTHON'
import torch


def gradient(function, at):
    x = torch.tensor([at], requires_grad=True)
    function(x).sum().backward()
    return x.grad.item()


low, high = torch.tensor([1.0]), torch.tensor([3.0])
found = [
    gradient(lambda x: x.clamp(1.0, 3.0), 3.0),
    gradient(lambda x: x.clamp(low, high), 3.0),
    gradient(lambda x: torch.minimum(x, high), 3.0),
    gradient(lambda x: x.clamp(1.0, 3.0), 2.0),
]
print("clamp(3, 1, 3) {}; bounds as tensors {}; minimum {}; inside {}".format(*found))
assert found == [0.0, 0.5, 0.5, 1.0]
PYTHON
