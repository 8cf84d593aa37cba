"""Plug-ins of the user for --advantage, --policy-loss and --reward: found, wrapped, or rejected in one line."""

import sys

import pytest

from megarl import plugins
from megarl.arguments import parse
from megarl.errors import UsageError
from tests.helpers.models.tiny_models import SHAPES
from tests.helpers.texts.refusals import refusal

SOURCE = """
import functools
from megarl.algorithms.estimators import Advantages
from tests.helpers.texts.refusals import refusal
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
def alone(step):
    return None
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
    return refusal(program, *flags)


def test_names_are_built_in_or_functions():
    import my_plugins

    assert plugins.load("--x", "two", BUILT_IN) == 2
    assert plugins.load("--x", "my_plugins:plain", BUILT_IN) is my_plugins.plain
    assert plugins.load("--x", "my_plugins:instance", BUILT_IN) is my_plugins.instance


@pytest.mark.parametrize("name, message", [
    ("three", "unknown; allowed: one, two, or a plug-in as file.py:function or package.module:function"),
    ("", "unknown; allowed: one, two"), (":plain", "unknown; allowed"), ("my_plugins:", "unknown; allowed"),
    ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"),
    ("my_plugins.deeper:f", "cannot import my_plugins.deeper: ModuleNotFoundError"),
    (".relative:f", "cannot import .relative: TypeError"),
    ("broken_plugins:f", "cannot import broken_plugins: ValueError: first second"),
    ("leaving_plugins:f", "cannot import leaving_plugins: SystemExit: 3"),
    ("a/my_plugins.py:loss", "cannot import a/my_plugins.py: FileNotFoundError: no such file /"),
    ("a/my_plugins.py", "names a file alone; write a/my_plugins.py:NAME, of a function in it"),
    ("my_plugins:nothing", "my_plugins has no nothing"),
    ("my_plugins:limit", "my_plugins has a non-callable limit"),
    ("my_plugins:later", "is async, and nothing awaits it"), ("my_plugins:partly", "is async, and nothing awaits it"),
    ("my_plugins:waiter", "is async, and nothing awaits it"), ("my_plugins:many", "yields; allowed is a function that"),
])  # fmt: skip
def test_anything_else_is_rejected_in_one_line(name, message):
    with pytest.raises(UsageError) as caught:
        plugins.load("--flag", name, BUILT_IN)
    assert str(caught.value).startswith(f"--flag {name}: {message}") and "\n" not in str(caught.value)


def test_a_file_is_imported_once_and_finds_its_neighbours(plug_ins):
    folder = plug_ins / "elsewhere"
    folder.mkdir()
    (folder / "beside_it.py").write_text("LIMIT = 2\n")
    (folder / "code.py").write_text("import beside_it\nLIMITS = [beside_it.LIMIT]\ndef f(x):\n    return LIMITS\n"
                                    "def g(x):\n    return LIMITS\n")  # fmt: skip
    f, g = (plugins.load("--x", f"{folder}/code.py:{name}", BUILT_IN) for name in "fg")
    assert f(1) is g(1) == [2]
    program("--advantage", f"{plug_ins}/my_plugins.py:plain", "--policy-loss", f"{plug_ins}/my_plugins.py:loss")
    sys.path.remove(str(folder))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0", b"def f(:", b"f = 1 / 0", b"raise SystemExit", None])
def test_a_file_that_is_no_program_is_said_in_one_line(content, tmp_path):
    path = tmp_path / "code.py"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        plugins.load("--flag", f"{path}:f", BUILT_IN)
    assert str(caught.value).startswith(f"--flag {path}:f: cannot import {path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name, is_one", [
    ("a.b:c", True), ("a:b", True), ("x/y-z.py:c", True), ("c:/x.py:c", True), ("a:", False), (":b", False),
    ("a.py", False), ("a b:c", False), (".py:c", False), ("a:b.c", False),
])  # fmt: skip
def test_the_form_of_a_plug_in(name, is_one):
    assert plugins.is_plugin(name) == is_one


@pytest.mark.parametrize("flag, takes", [("--advantage", "step, options"), ("--policy-loss", "tokens, options")])
def test_other_parameters_are_said_with_the_place_of_the_function(flag, takes, plug_ins):
    """At once, not in the first step; without frames of megarl."""
    line = error_of(flag, "my_plugins:alone")
    at = SOURCE[: SOURCE.index("def alone")].count("\n") + 1
    assert line == (
        f"{flag} my_plugins:alone: takes (step) ({plug_ins}/my_plugins.py:{at}); megarl calls it with ({takes})"
    )


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
