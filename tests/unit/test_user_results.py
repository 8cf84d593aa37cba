"""What functions of the user give: numbers of any library, and results that are awaited."""

import asyncio
import functools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from megarl import user_results


@pytest.mark.parametrize("value, number", [
    (True, 1.0), (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25), (np.float32(0.5), 0.5), (np.ones((1, 1)), 1.0),
    (torch.tensor(3), 3.0), (-(10**400), -math.inf), (np.ones(2), None), ("1", None), (None, None), (np.float32, None),
])  # fmt: skip
def test_numbers_have_the_forms_of_any_library(value, number):
    assert user_results.number_of(value) == number
    assert math.isnan(user_results.number_of(Decimal("sNaN")))


def test_no_value_is_too_odd_to_be_shown():
    class Odd:
        def __repr__(self):
            raise ValueError("no")

    assert user_results.shown(Odd()) == "a value of the type Odd" and user_results.shown(10**5000)
    assert len(user_results.shown("x" * 1000)) == 200


async def later(item):
    await asyncio.sleep(60 if item == "late" else 0)
    if item in ("fails", "times out"):
        raise KeyError(item) if item == "fails" else TimeoutError("its own")
    return item


def test_calls_are_awaited_each_within_its_limit():
    assert user_results.is_async(functools.partial(later, 1)) and not user_results.is_async(len)
    assert user_results.settled(later(1)) == user_results.settled(1) == 1
    found = user_results.run(user_results.together(later, ["a", "late", "fails", "times out"], 0.2, 4))
    assert found[0] == "a" and isinstance(found[2], KeyError)
    assert [type(each) for each in (found[1], found[3])] == [user_results.LateCall, TimeoutError]
    assert user_results.is_generator(lambda: (yield)) and not user_results.is_generator(later)
