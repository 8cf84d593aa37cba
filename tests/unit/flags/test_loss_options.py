"""Options of policy losses as flags: those of a new row, of a plug-in, and of another loss than the chosen one."""

import importlib
import math
import re

import pytest
import torch
import yaml

from megarl.algorithms.policy_loss import PolicyTokens
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.arguments import build_parser
from tests.helpers.flag_rules import parsed, refused
from tests.helpers.programs import ROOT, metrics, rl_argv, train

NEW_LOSS = '''
"""A loss that somebody adds."""
import dataclasses
from megarl.algorithms.policy_loss import ClipRange, PolicyLoss, option

@dataclasses.dataclass(frozen=True)
class Options(ClipRange):
    weight: float = option(1.5, "100% of the penalty", lambda value: 0 <= value < 9, "0 or more, below 9")
    kind: str = option("square", "of the penalty", lambda value: value in ("square", "line"), "square, line")
    is_soft: bool = option(False, "a soft clip")

def penalised(tokens, options):
    return options

NEW_LOSS = PolicyLoss("new-loss", penalised, Options())
'''
PLUG_IN = """
import dataclasses
from megarl.algorithms.policy_losses.single_tokens import reinforce

@dataclasses.dataclass
class Options:
    scale: float = 1.0
    is_on: bool = False
    def __post_init__(self):
        if self.scale > 5:
            raise ValueError(f"a scale of {self.scale} is too much")

def scaled(tokens, options):
    terms = reinforce(tokens, None)
    return terms._replace(loss=options.scale * terms.loss)
scaled.options = Options

@dataclasses.dataclass
class Later:
    weight: float = dataclasses.field(default=1.0, metadata={"flag": "gamma"})

def later(tokens, options):
    return None
later.options = Later
"""


def idle(flags: str) -> str:
    (warning,) = parsed(flags).warnings
    return warning.removeprefix("without effect: ")


# -- built in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss, flags, expected", [
    ("ppo-clip", "--clip-range 0.3", {"clip-range": 0.3, "clip-range-high": 0.3, "dual-clip": None}),
    ("ppo-clip", "--clip-range-high 0.3 --dual-clip 3", {"clip-range": 0.2, "clip-range-high": 0.3, "dual-clip": 3.0}),
    ("gspo", "--clip-range 3e-4 --clip-range-high 4e-4", {"clip-range": 3e-4, "clip-range-high": 4e-4}),
    ("reinforce", "", {}),
    ("sapo", "", {"sapo-tau-positive": 1.0, "sapo-tau-negative": 1.05}),
    ("sapo", "--sapo-tau-negative 2", {"sapo-tau-positive": 1.0, "sapo-tau-negative": 2.0}),
])  # fmt: skip
def test_options_reach_the_loss(loss, flags, expected):
    program = parsed(f"--policy-loss {loss} {flags}")
    assert program.policy_loss.values() == expected and program.warnings == ()
    record = {name.replace("_", "-"): value for name, value in program.megarl_settings().items()}
    assert expected.items() <= record.items() and record["gamma"] == 1.0
    assert POLICY_LOSSES[loss].options == type(program.policy_loss.options)()  # defaults stay as they are


@pytest.mark.parametrize("flag, value, allowed", [
    ("clip-range", "-0.1", "a number above 0"), ("clip-range-high", "0", "a number above 0"),
    ("dual-clip", "1", "above 1"), ("dual-clip", "nan", "above 1"),
    ("sapo-tau-positive", "0", "a finite number above 0"), ("sapo-tau-negative", "inf", "a finite number above 0"),
])  # fmt: skip
@pytest.mark.parametrize("loss", ["sapo", "ppo-clip"])
def test_wrong_options(flag, value, allowed, loss):
    line = refused(f"--policy-loss {loss} --{flag} {value}")
    assert line == f"--{flag} {float(value)}: allowed is {allowed}"
    assert refused(f"--policy-loss {loss} --{flag} much").startswith(f"argument --{flag}: invalid float value: 'much'")


def test_options_of_another_loss_are_dropped_with_a_warning():
    assert idle("--sapo-tau-positive 2") == "--sapo-tau-positive (--policy-loss ppo-clip does not use them)"
    assert idle("--policy-loss sapo --clip-range 1 --dual-clip 3 --sapo-tau-positive 2") == (
        "--clip-range, --dual-clip (--policy-loss sapo does not use them)"
    )
    assert parsed("--policy-loss gspo --dual-clip 3").policy_loss == parsed("--policy-loss gspo").policy_loss


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_all_options_of_other_losses_are_named_once(name):
    """Those that several losses share, too, where this one does not read them."""
    losses = POLICY_LOSSES
    values = {"clip-range-high": 0.3, "dual-clip": 3.0, "dppo-tv-high": 0.3, "dppo-kl-high": 0.3}
    values = {flag: value for loss in losses.values() for flag, value in loss.values().items() if value} | values
    others = {flag: value for flag, value in values.items() if flag not in losses[name].flags()}
    words = " ".join(f"--{flag} {value}" for flag, value in others.items())
    program = parsed(f"--policy-loss {name} {words} --advantage grpo")
    assert program.policy_loss == losses[name] and len(others) >= 19
    (line,) = program.warnings
    flags = ", ".join(f"--{flag}" for flag in others)
    assert sorted(line.removeprefix("without effect: ").partition(" (")[0].split(", ")) == sorted(flags.split(", "))
    assert line.endswith(f" (--policy-loss {name} does not use them)")


def test_only_rl_has_loss_options(tmp_path):
    """An evaluation passes over them in a file."""
    flags = {flag for loss in POLICY_LOSSES.values() for flag in loss.flags()}
    assert len(flags) == 25
    (tmp_path / "c.yaml").write_text("".join(f"{flag}: 2\n" for flag in flags) + "policy-loss: sapo\n")
    parsed(f"--config {tmp_path}/c.yaml", "evaluate")
    for flag in flags:
        assert f"--{flag} " in build_parser("rl").format_help()
        for program in ("sft", "reward", "evaluate"):
            assert f"--{flag} " not in build_parser(program).format_help()
            assert f"--{flag}: unknown flag" in refused(f"--{flag} 2", program)


# -- a new row --------------------------------------------------------------------------------------------------


@pytest.fixture
def new_loss(plug_ins, monkeypatch):
    """The table of losses has one row more."""
    (plug_ins / "new_loss.py").write_text(NEW_LOSS)
    found = importlib.import_module("new_loss").NEW_LOSS
    monkeypatch.setitem(POLICY_LOSSES, "new-loss", found)
    return found


def test_a_new_row_brings_its_flags(new_loss, tmp_path):
    (tmp_path / "c.yaml").write_text("policy-loss: new-loss\nnew-loss-weight: 3\nnew-loss-is-soft: true\n")
    loss = parsed(f"--config {tmp_path}/c.yaml --new-loss-kind line --clip-range 0.4").policy_loss
    assert loss.function is new_loss.function
    assert loss.options == type(new_loss.options)(0.4, 0.4, 3.0, "line", True)
    assert (new_loss.options.weight, new_loss.options.kind, new_loss.options.is_soft) == (1.5, "square", False)
    assert idle("--new-loss-weight 3") == "--new-loss-weight (--policy-loss ppo-clip does not use them)"
    text = " ".join(build_parser("rl").format_help().split())
    assert "--new-loss-weight NEW-LOSS-WEIGHT 100% of the penalty (default 1.5)" in text


@pytest.mark.parametrize("flags, says", [
    ("--new-loss-weight 9", "--new-loss-weight 9.0: allowed is 0 or more, below 9"),
    ("--new-loss-kind cube", "--new-loss-kind cube: allowed is square, line"),
    ("--new-loss-weight x", "argument --new-loss-weight: invalid float value: 'x'"),
    ("--new-loss-is-soft perhaps", "argument --new-loss-is-soft: 'perhaps': allowed true or false"),
    ("--new-loss-wieght 1", "--new-loss-wieght: unknown flag; did you mean --new-loss-weight?"),
])  # fmt: skip
def test_wrong_values_for_a_new_row(new_loss, flags, says):
    assert refused(f"--policy-loss new-loss {flags}") == says


# -- a plug-in ---------------------------------------------------------------------------------------------------


@pytest.fixture
def plug_in(plug_ins):
    (plug_ins / "my_losses.py").write_text(PLUG_IN)


def test_a_plug_in_brings_its_flags(plug_in, tmp_path):
    text = "policy-loss: my_losses:scaled\nscaled-scale: 0.5\nscaled-is-on: true\n"
    (tmp_path / "c.yaml").write_text(text)
    program = parsed(f"--config {tmp_path}/c.yaml --scaled-scale 2")
    assert program.policy_loss.values() == {"scaled-scale": 2.0, "scaled-is-on": True}
    assert idle("--policy-loss my_losses:scaled --dual-clip 3") == (
        "--dual-clip (--policy-loss my_losses:scaled does not use them)"
    )
    parsed(f"--config {tmp_path}/c.yaml", "evaluate")
    assert "--scaled-scale: unknown flag" in refused("--scaled-scale 2")


@pytest.mark.parametrize("flags, says", [
    ("scaled --scaled-scale x", "argument --scaled-scale: invalid float value: 'x'"),
    ("scaled --scaled-scale 6", "--policy-loss my_losses:scaled: a scale of 6.0 is too much"),
    ("scaled --scaled-sclae 6", "--scaled-sclae: unknown flag; did you mean --scaled-scale?"),
    ("later", "--gamma: is an option of the policy loss later, but this flag exists already; rename the option"),
])  # fmt: skip
def test_wrong_values_for_a_plug_in(plug_in, flags, says):
    assert refused(f"--policy-loss my_losses:{flags}") == says


def test_options_reach_training_and_the_settings_file(plug_in, tmp_path):
    """Twice the loss has twice the gradient."""
    flags = (
        "--advantage grpo --kl-coefficient 0 --entropy-coefficient 0 --train-iters 1 --clip-grad 0 --minibatch-size 12"
        " --ppo-epochs 1 --reward tests.helpers.programs:digit_reward --policy-loss my_losses:scaled"
    )
    norms = []
    for scale in (1, 2):
        train("rl", rl_argv(tmp_path / str(scale), f"{flags} --scaled-scale {scale}"))
        norms.append(metrics(tmp_path / str(scale))[1]["actor/grad_norm"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5) and norms[0] > 0
    record = yaml.safe_load((tmp_path / "2" / "settings.yaml").read_text())["megarl"]
    assert record["scaled_scale"] == 2.0 and record["policy_loss"] == "my_losses:scaled"


# -- the documentation -------------------------------------------------------------------------------------------


def test_the_loss_file_of_the_docs_works_unchanged(plug_ins, monkeypatch):
    text = (ROOT / "docs" / "extending.md").read_text()
    (code,) = re.findall(r"## A policy loss as part of megarl\n.*?```python\n(.*?)```", text, re.DOTALL)
    (plug_ins / "squared.py").write_text(code)
    monkeypatch.setitem(POLICY_LOSSES, "squared", importlib.import_module("squared").SQUARED)
    loss = parsed("--policy-loss squared --squared-weight 3 --clip-range 0.5").policy_loss
    assert loss.values() == {"clip-range": 0.5, "clip-range-high": 0.5, "squared-weight": 3.0}
    logprobs = torch.tensor([0.0, math.log(2), math.log(0.25)], requires_grad=True)
    mask, borders = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    terms = loss.function(
        PolicyTokens(logprobs, torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]), mask, borders), loss.options
    )
    torch.testing.assert_close(terms.loss, torch.tensor([-1.0, -4.0 + 3 * 0.25, -1.0 + 3 * 0.0625]))
    assert terms.clipped.tolist() == [False, True, True]
