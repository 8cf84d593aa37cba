"""Grouping of tensor names, and the comparison of two tensors."""

import math

import pytest
import torch

from tools import _tensor_sources
from tools._tensor_sources import TensorPart, difference, groups


def parts(*names: str, dtype="float32", shape=(4, 2)) -> dict:
    return {name: TensorPart(name, None, dtype, shape) for name in names}


def test_names_that_differ_in_numbers_share_a_pattern():
    found = groups(parts("embedding.weight", *(f"layers.{i}.mlp.weight" for i in (0, 1, 2, 5))))
    assert list(found) == ["embedding.weight", "layers.{0-2,5}.mlp.weight"]
    assert found["layers.{0-2,5}.mlp.weight"] == [f"layers.{i}.mlp.weight" for i in (0, 1, 2, 5)]
    experts = groups(parts(*(f"layers.{i}.experts.{j}.up.weight" for i in range(2) for j in range(3))))
    assert list(experts) == ["layers.{0-1}.experts.{0-2}.up.weight"]
    assert list(groups(parts("layers.3.norm"))) == ["layers.3.norm"]


def test_other_types_and_shapes_have_lines_of_their_own():
    names = {**parts("layers.0.w", "layers.1.w"), **parts("layers.2.w", shape=(8, 2)),
             **parts("layers.3.w", "layers.4.w", dtype="bfloat16")}  # fmt: skip
    assert list(groups(names)) == ["layers.{0-1}.w", "layers.2.w", "layers.{3-4}.w"]


def test_sizes():
    part = parts("a", dtype="bfloat16", shape=(3, 5))["a"]
    assert (part.numel, part.bytes) == (15, 30)
    assert parts("a", shape=())["a"].bytes == 4


@pytest.fixture(params=[1 << 22, 3])
def block(request, monkeypatch):
    """Tensors are compared whole, and in blocks of three elements."""
    monkeypatch.setattr(_tensor_sources, "BLOCK", request.param)


def test_the_largest_difference_and_its_size_beside_the_values(block):
    one = torch.tensor([[1.0, -8.0, 3.0], [0.5, 2.0, 0.0]])
    other = one.clone()
    assert difference(one, other) == (True, 0.0, 0.0)
    other[1, 1] = 2.5
    other[0, 2] = 2.9
    assert difference(one, other) == (False, 0.5, 0.0625)
    assert difference(torch.zeros(4), torch.ones(4)) == (False, 1.0, math.inf)
    assert difference(torch.zeros(0), torch.zeros(0)) == (True, 0.0, 0.0)


def test_what_is_equal_in_value_but_not_in_bits_is_not_equal(block):
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert difference(values, values.bfloat16()) == (False, 0.0, 0.0)
    assert difference(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == (False, 0.0, 0.0)


def test_numbers_that_are_not_finite_are_never_a_small_difference(block):
    nan, inf = torch.tensor([1.0, math.nan, 2.0, 3.0]), torch.tensor([1.0, math.inf, 2.0, 3.0])
    assert difference(nan, nan.clone()) == (True, 0.0, 0.0) and difference(inf, inf.clone()) == (True, 0.0, 0.0)
    for one, other in ((nan, inf), (nan, torch.ones(4)), (torch.ones(4), inf), (inf, -inf)):
        assert difference(one, other).largest == math.inf and not difference(one, other).is_equal


def test_integers_and_bytes_are_compared_too(block):
    assert difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 6])) == (False, 2.0, 0.5)
