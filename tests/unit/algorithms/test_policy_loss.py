"""Records, options and flags of policy losses, and plug-ins."""

import dataclasses
import re

import pytest
import torch

from megarl.algorithms.policy_loss import (
    ClipOptions,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    option_kinds,
    policy_loss_of,
)
from megarl.algorithms.policy_losses import POLICY_LOSSES


def test_wrong_shapes_are_rejected():
    ones, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"logprobs \[2\], old_logprobs \[1\]"):
        PolicyTokens(ones, ones[:1], ones, mask, torch.tensor([0, 2]))


def test_the_upper_clip_range_is_the_lower_one_unless_given():
    loss = POLICY_LOSSES["gspo"]
    assert loss.options.high == 0.2 and loss.with_options({"clip-range": 0.4}).options.high == 0.4
    assert loss.with_options({"clip-range-high": 0.3}).values() == {"clip-range": 0.2, "clip-range-high": 0.3}


# -- plug-ins ----------------------------------------------------------------------------------------------------


def halved(tokens, clip):
    terms = POLICY_LOSSES["ppo-clip"].function(tokens, clip)
    return PolicyTerms(0.5 * terms.loss, terms.clipped, terms.approx_kl)


def with_options(**fields):
    """`halved` with its own options: name=(annotation, default…)."""

    def function(tokens, options):
        return halved(tokens, options)

    function.options = dataclasses.make_dataclass("Options", [
        (name, kind, *(dataclasses.field(default=value) for value in default))
        for name, (kind, *default) in fields.items()
    ], frozen=True)  # fmt: skip
    return function


def test_a_plug_in_loss_takes_the_clip_options():
    loss = policy_loss_of("halved", halved)
    assert loss == PolicyLoss("halved", halved, ClipOptions())
    assert list(loss.flags()) == ["clip-range", "clip-range-high", "dual-clip"]


def test_a_plug_in_loss_may_have_its_own_options():
    loss = policy_loss_of("my_loss", with_options(weight=(float, 2.0), kind=(str | None, None), is_on=(bool, True)))
    assert option_kinds(loss) == {"my-loss-weight": float, "my-loss-kind": str, "my-loss-is-on": bool}
    chosen = loss.with_options({"my-loss-weight": 3.0, "gamma": 0.5})
    assert chosen.values() == {"my-loss-weight": 3.0, "my-loss-kind": None, "my-loss-is-on": True}
    assert chosen.function is loss.function and loss.options.weight == 2.0


@pytest.mark.parametrize("fields, says", [
    ({"weight": (float,)}, "options of f need defaults: weight"),
    ({"weights": (list[int], ())}, "option weights of f is list"),
    ({"weight": (int | float, 1)}, "option weight of f is int | float; allowed: int, float, bool, str"),
])  # fmt: skip
def test_options_that_cannot_be_flags(fields, says):
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        policy_loss_of("f", with_options(**fields))
    halved_with_a_table = with_options()
    halved_with_a_table.options = {"weight": 1.0}
    with pytest.raises(ValueError, match="options of f must be a dataclass"):
        policy_loss_of("f", halved_with_a_table)
