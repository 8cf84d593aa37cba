"""The command `megarl`, and the files that it finds from every folder."""

import sys
from pathlib import Path

import pytest

import megarl
from megarl import __main__ as command
from megarl import arguments, bundled, launcher
from megarl.errors import UsageError

ROOT = Path(megarl.__file__).parents[1]


@pytest.mark.parametrize(("name", "line"), [
    ("train_lr", "train_lr: unknown program; did you mean train_rl?"),
    ("make_prompt", "make_prompt: unknown program; did you mean make_prompts?"),
    ("x", f"x: unknown program; allowed: {', '.join(launcher.PROGRAMS)}, plan, "),
])  # fmt: skip
def test_an_unknown_program_is_one_line(name, line, capsys):
    assert command.main([name, "--seed", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"megarl: error: {line}") and err.count("\n") == 1


def test_the_launcher_refuses_an_unknown_program_before_it_imports_it(capsys):
    assert launcher.main(["--nproc-per-node", "1", "errors"]) == 2
    assert capsys.readouterr().err == (
        "megarl: error: errors: unknown program; "
        "allowed: train_rl, train_sft, train_reward, train_preference, evaluate, serve, replay, generate\n"
    )


@pytest.mark.parametrize("flags", [["train_rl", "--seed", "1"], ["--nproc-per-node", "4", "train_rl"]])
def test_programs_on_ranks_are_the_launchers(flags, monkeypatch):
    monkeypatch.setattr(launcher, "main", lambda argv: (argv, "launched"))
    assert command.main(flags) == (flags, "launched")


def test_programs_of_one_process_get_their_flags(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "run", lambda module, flags: (module, flags))
    assert command.main(["plan", "--help"]) == ("megarl.plan", ["--help"])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command.main(["make_products", "--no-such-flag"]) == 2
    assert capsys.readouterr().err.startswith("make_products: ") and sys.argv[1:] == ["--no-such-flag"]


def test_the_help_names_every_program_with_its_purpose(capsys):
    assert command.main(["--help"]) == 0 and command.main([]) == 2
    out, err = capsys.readouterr()
    assert out == err
    for name in [*launcher.PROGRAMS, *command.MODULES, *bundled.tools()]:
        (line,) = (line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert len(line.split()) > 4


def test_own_configs_are_found_from_every_folder_and_come_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ROOT / "configs/recipes/grpo.yaml"
    assert bundled.find("configs/recipes/grpo.yaml") == own
    for other in ("recipes/grpo.yaml", "configs/../setup.py", "configs/none.yaml", str(tmp_path / "configs/x.yaml")):
        assert bundled.find(other) == Path(other)
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --max-prompt-length 4 --max-response-length 4"
    flags = ["--config", "configs/recipes/grpo.yaml", *model.split()]
    assert arguments.parse(flags, 1).settings.kl_coefficient == 0.04
    with pytest.raises(UsageError, match="--config configs/none.yaml: cannot be read"):
        arguments.parse(["--config", "configs/none.yaml"], 1)
    (tmp_path / "configs/recipes").mkdir(parents=True)
    (tmp_path / "configs/recipes/grpo.yaml").write_text("kl-coefficient: 0.5\n")
    assert arguments.parse(flags, 1).settings.kl_coefficient == 0.5
