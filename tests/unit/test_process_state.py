"""What a plug-in changes in the process: each state is put back after the call, also after a failure, and said once."""

import os
import signal
import sys
import threading

import pytest
import torch

from megarl import plugins
from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.rewards.base import Sample
from megarl.rewards.chosen_verifiers import build_verifiers
from megarl.tool_formats.chosen_format import load_format
from tests.helpers.models.tiny_models import SHAPES

FLAG = "--reward their:reward"


def closed(name: str) -> bool:
    return getattr(sys, name).closed


def _ignore(*_):
    """Another handler than any of the test process."""


# What the warning names -> (how it is read, how a plug-in changes it).
STATES = {
    "the working directory": (os.getcwd, lambda: os.chdir("/")),
    "sys.stdout": (lambda: closed("stdout"), lambda: sys.stdout.close()),
    "sys.stderr": (lambda: sys.stderr, lambda: setattr(sys, "stderr", None)),
    "the handler of SIGTERM": (lambda: signal.getsignal(signal.SIGTERM),
                               lambda: signal.signal(signal.SIGTERM, _ignore)),
    "the handler of SIGINT": (lambda: signal.getsignal(signal.SIGINT),
                              lambda: signal.signal(signal.SIGINT, _ignore)),
    "the handler of SIGUSR1": (lambda: signal.getsignal(signal.SIGUSR1),
                               lambda: signal.signal(signal.SIGUSR1, _ignore)),
    "whether torch computes gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "torch's default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "torch's default device": (lambda: torch.empty(0).device, lambda: torch.set_default_device("meta")),
    "torch's number of threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "torch's deterministic algorithms": (torch.are_deterministic_algorithms_enabled,
                                         lambda: torch.use_deterministic_algorithms(True)),
    "torch's precision of matrix products": (torch.get_float32_matmul_precision,
                                             lambda: torch.set_float32_matmul_precision("medium")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(plugins, "_reported", set())


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a_state_is_put_back_and_named_once(name, raises, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", open(tmp_path / "stdout", "w"))  # that of pytest must stay open
    read, change = STATES[name]
    before, seen = read(), []

    def plug_in():
        change()
        seen.append(read())
        if raises:
            raise ValueError("theirs")

    for _ in range(2):
        try:
            plugins.keeping(FLAG, plug_in)()
        except ValueError as error:
            assert raises and str(error) == "theirs"
        assert read() == before
    assert len(seen) == 2 and before not in seen
    said = f"megarl: warning: {FLAG} changed {name}; the run needs it, so it is put back after each call\n"
    assert capsys.readouterr().err == said


def test_the_list_of_states_is_whole():
    assert {name for name, *_ in plugins._states()} == STATES.keys()


def test_what_changes_nothing_says_nothing_and_another_change_is_said(capsys):
    plugins.keeping(FLAG, lambda: None)()
    assert capsys.readouterr().err == ""
    for names in (["torch's default dtype"], ["torch's default dtype", "torch's number of threads"]):
        plugins.keeping(FLAG, lambda names=names: [STATES[name][1]() for name in names])()
    first, second = capsys.readouterr().err.splitlines()
    assert "dtype" in first and "threads" not in first and "threads" in second and "dtype" not in second


def test_a_thread_keeps_all_but_handlers_of_signals():
    found = []

    def in_thread():
        plugins.keeping(FLAG, STATES["torch's default dtype"][1])()
        found.extend(name for name, *_ in plugins._states())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert torch.get_default_dtype() is torch.float32
    assert found == [name for name in STATES if "handler" not in name]


PLUG_IN = """
import os, torch
from megarl.rewards import Score
torch.set_num_threads(3)

def reward(sample):
    torch.set_grad_enabled(False)
    before = os.getcwd()
    os.chdir("/")
    return Score(1.0, True, extracted=before)

def loss(tokens, clip):
    torch.set_default_dtype(torch.float64)
    return tokens, clip

def calls(text):
    torch.set_default_dtype(torch.float64)
    return text, []
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_verifiers_change_this_process_never_and_their_own_if_they_have_one(workers, plug_ins, capsys):
    (plug_ins / "rude_rewards.py").write_text(PLUG_IN)
    name = "rude_rewards:reward"
    verifiers = build_verifiers(Settings(reward=name, reward_workers=workers, reward_timeout=60.0))
    assert torch.get_num_threads() == 1 and capsys.readouterr().err == (
        f"megarl: warning: --reward {name} changed torch's number of threads; the run needs it, so it is put back "
        "after each call\n"
    )
    try:
        scores = [verifiers.score([Sample("q", "a"), Sample("q", "b")])[name] for _ in range(2)]
    finally:
        verifiers.close()
    here, folders = os.getcwd(), [score.extracted for of_call in scores for score in of_call]
    assert folders == ([here, "/", "/", "/"] if workers else [here, "/", here, "/"])  # once for all samples of a call
    assert here != "/" and torch.is_grad_enabled()
    said = f"--reward {name} changed the working directory, whether torch computes gradients;"
    assert capsys.readouterr().err.count(said) == (0 if workers else 1)


def test_losses_and_parsers_of_the_user_are_kept_too(plug_ins, capsys):
    (plug_ins / "rude_losses.py").write_text(PLUG_IN)
    parsed = parse([*SHAPES["llama"].split(), "--policy-loss", "rude_losses:loss"], 1)
    assert parsed.policy_loss.function("tokens", "clip") == ("tokens", "clip")
    assert load_format("rude_losses:calls").parser("text") == ("text", [])
    assert torch.get_default_dtype() is torch.float32 and torch.get_num_threads() == 1
    said = capsys.readouterr().err
    assert said.count("--policy-loss rude_losses:loss changed torch's default dtype;") == 1
    assert said.count("--tool-call-parser rude_losses:calls changed torch's default dtype;") == 1
    with pytest.raises(UsageError, match="^--tool-call-parser rude_losses:no: rude_losses has no no"):
        load_format("rude_losses:no")
