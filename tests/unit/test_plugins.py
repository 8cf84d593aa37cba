"""Plug-ins of the user for --advantage, --policy-loss and --reward: found, wrapped, or rejected in one line."""

import pytest

from megarl import plugins
from megarl.arguments import parse
from megarl.errors import UsageError
from tests.helpers.tiny_models import SHAPES

SOURCE = """
import functools
from megarl.algorithms.estimators import Advantages
limit = 3
def plain(step, options):
    return Advantages(step.token_rewards, None)
def with_values(step, options):
    return Advantages(step.token_rewards - step.values, step.token_rewards)
with_values.needs = ["values"]
def grouped(step, options):
    return Advantages(step.token_rewards, None)
grouped.needs = ("groups", "baselines")
def greedy_for_more(step, options):
    return None
greedy_for_more.needs = ["rewards"]
def loss(tokens, clip):
    return tokens, clip
class Callable:
    def __call__(self, tokens, clip):
        return clip.dual
instance = Callable()
async def later(step, options):
    return None
partly = functools.partial(later, None)
class Waiter:
    async def __call__(self, step, options):
        return None
waiter = Waiter()
def many(step, options):
    yield None
"""
BUILT_IN = {"one": 1, "two": 2}


@pytest.fixture(autouse=True)
def modules(plug_ins):
    (plug_ins / "my_plugins.py").write_text(SOURCE)
    (plug_ins / "broken_plugins.py").write_text("raise ValueError('first\\nsecond')\n")
    (plug_ins / "leaving_plugins.py").write_text("raise SystemExit(3)\n")


def program(*flags: str):
    return parse([*SHAPES["llama"].split(), *flags], 1)


def error_of(*flags: str) -> str:
    with pytest.raises(UsageError) as caught:
        program(*flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_are_built_in_or_functions():
    import my_plugins

    assert plugins.load("--x", "two", BUILT_IN) == 2
    assert plugins.load("--x", "my_plugins:plain", BUILT_IN) is my_plugins.plain
    assert plugins.load("--x", "my_plugins:instance", BUILT_IN) is my_plugins.instance


@pytest.mark.parametrize("name, message", [
    ("three", "unknown; allowed: one, two, or a plug-in as package.module:function"),
    ("", "unknown; allowed: one, two"), (":plain", "unknown; allowed"), ("my_plugins:", "unknown; allowed"),
    ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"),
    ("my_plugins.deeper:f", "cannot import my_plugins.deeper: ModuleNotFoundError"),
    (".relative:f", "cannot import .relative: TypeError"),
    ("broken_plugins:f", "cannot import broken_plugins: ValueError: first second"),
    ("leaving_plugins:f", "cannot import leaving_plugins: SystemExit: 3"),
    ("a/my_plugins.py:loss", "is a file; write my_plugins:loss, with its folder in PYTHONPATH"),
    ("my_plugins:nothing", "my_plugins has no nothing"),
    ("my_plugins:limit", "my_plugins has a non-callable limit"),
    ("my_plugins:later", "is async, and nothing awaits it"), ("my_plugins:partly", "is async, and nothing awaits it"),
    ("my_plugins:waiter", "is async, and nothing awaits it"), ("my_plugins:many", "yields; allowed is a function that"),
])  # fmt: skip
def test_anything_else_is_rejected_in_one_line(name, message):
    with pytest.raises(UsageError) as caught:
        plugins.load("--flag", name, BUILT_IN)
    assert str(caught.value).startswith(f"--flag {name}: {message}") and "\n" not in str(caught.value)


def test_an_estimator_declares_its_needs():
    assert "critic" not in program("--advantage", "my_plugins:plain").roles
    with_values = program(
        "--advantage", "my_plugins:with_values", "--gamma", "0.9", "--gae-lambda", "1", "--critic-lr", "1e-3"
    )
    assert "critic" in with_values.roles and with_values.estimator.needs == {"values"}
    line = error_of("--advantage", "my_plugins:grouped", "--samples-per-prompt", "1", "--greedy-baseline")
    assert line.startswith("--samples-per-prompt 1: --advantage my_plugins:grouped compares")
    assert error_of("--advantage", "my_plugins:grouped").startswith("--advantage my_plugins:grouped: needs --greedy")
    assert program("--advantage", "my_plugins:grouped", "--greedy-baseline").estimator.needs == {"groups", "baselines"}


def test_an_estimator_with_unknown_needs():
    line = error_of("--advantage", "my_plugins:greedy_for_more")
    assert line.startswith("--advantage my_plugins:greedy_for_more: needs of greedy_for_more must be from")


def test_a_policy_loss_may_read_every_option():
    loss = program("--policy-loss", "my_plugins:loss", "--dual-clip", "3", "--clip-range-high", "0.3").policy_loss
    assert loss.function("tokens", "clip") == ("tokens", "clip")


@pytest.mark.parametrize(
    "flag, first", [("--advantage", "gae, grpo"), ("--policy-loss", "cispo, clip-cov, dppo-kl, dppo-tv")]
)
def test_an_unknown_name_lists_the_known_ones(flag, first):
    assert error_of(flag, "nothing").startswith(f"{flag} nothing: unknown; allowed: {first}")
