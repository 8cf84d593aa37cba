"""Megatron's options as a table: that of the parser, and the parser's with another version of Megatron."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.flags import megatron_options

ROOT = Path(__file__).parents[3]
CODE = "import sys; sys.argv = ['train_rl', *{argv}]; import megarl.train_rl as p; p.launch(p.train, 'rl')"
PRINTS = "; import atexit; atexit.register(lambda: print({'torch', 'megatron'} & {*sys.modules}))"


def test_the_table_is_that_of_the_installed_parser():
    """`tests/docs/test_reference.py` compares the file."""
    assert megatron_options.options.__wrapped__() == megatron_options.of_parser()
    assert len(megatron_options.options().destinations) > 500


def test_with_another_version_the_parser_is_asked(monkeypatch, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"megatron-core": "0.19.99", "options": {"--lr": ["other", 1, 0]}}))
    monkeypatch.setattr(megatron_options, "TABLE", tmp_path / "t.json")
    assert megatron_options.options.__wrapped__() == megatron_options.of_parser()


@pytest.mark.parametrize("argv, words", [
    (["--promptz", "x"], "did you mean --prompts?"), (["--critic-num-layerz", "2"], "-layerz: unknown flag"),
    (["--gamma", "3"], "--gamma 3.0: allowed is between 0 and 1"), (["--config", "nowhere.yaml"], "nowhere.yaml"),
    (["--rollout-lr", "1"], "the rollout runs the actor's model"),
    (["--group-filter", "reward", "--samples-per-prompt", "1"], "needs --samples-per-prompt 2 or more"),
    (["--role-map", "actor=0;critic=9"], "outside the world"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_without_torch(argv, words):
    code = "import sys" + PRINTS + "; " + CODE.format(argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "set()\n"
