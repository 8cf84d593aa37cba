"""Where compiled kernels are looked for and built, and what a run without them says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.mcore.kernels import native
from megarl.mcore.kernels.native import build

NAME = native._library_name("native")


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """An environment's folder without kernels, and a cache of the user."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "env").mkdir()
    return tmp_path / "env"


def forbid(monkeypatch, folder: Path):
    """Nobody may write this folder, which a test run by root cannot set up otherwise."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and allowed(path, mode))


def test_an_environment_that_can_be_written_has_the_files(prefix):
    assert native.own_folder() == prefix / "megarl"
    assert native.library_path() == prefix / "megarl" / NAME


def test_an_environment_of_others_leaves_the_users_cache(prefix, monkeypatch, tmp_path):
    forbid(monkeypatch, prefix)
    assert native.library_path() == tmp_path / "cache/megarl" / NAME
    (prefix / "megarl").mkdir()
    forbid(monkeypatch, prefix / "megarl")
    assert native.library_path() == tmp_path / "cache/megarl" / NAME
    (prefix / "megarl" / NAME).touch()  # built by the owner
    assert native.library_path() == prefix / "megarl" / NAME
    assert native.own_folder() == tmp_path / "cache/megarl"


def test_each_instruction_set_has_a_library_of_its_own(prefix, monkeypatch):
    assert NAME.startswith("kernels-native-")
    monkeypatch.setenv("MEGARL_KERNELS_MARCH", "haswell")
    assert native.library_path().name == NAME.replace("native", "haswell")
    assert build.command("c++", native.SOURCES, prefix / "x.so").count("-march=haswell") == 1


def test_without_a_home_the_environment_remains(prefix, monkeypatch):
    forbid(monkeypatch, prefix)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home
    assert native.own_folder() == prefix / "megarl"


def test_the_reason_of_an_absence_is_one_line(prefix, monkeypatch):
    monkeypatch.setattr(native, "is_built", lambda: False)
    todo = "; `python -m megarl build_kernels` makes them if there is a C++20 compiler"
    assert native.absence() == "no compiled kernels" + todo
    failed = prefix / "megarl" / NAME.replace(".so", ".failed")
    failed.parent.mkdir()
    failed.write_text("a warning\nno compiled kernels, so PyTorch's operators are used: no C++ compiler c++\n")
    assert native.absence() == "no compiled kernels, so PyTorch's operators are used: no C++ compiler c++" + todo
    monkeypatch.setattr(native, "is_built", lambda: True)
    assert native.absence() == ""


def test_the_command_builds_once_where_the_library_is_looked_for(prefix, monkeypatch, capsys):
    asked = []

    def made(sources, library):
        asked.append((sources, library))
        library.parent.mkdir()
        library.touch()

    monkeypatch.setattr(build, "build", made)
    assert build.main([]) == 0 and build.main([]) == 0
    library = prefix / "megarl" / NAME
    assert asked == [(native.SOURCES, library)]
    assert capsys.readouterr().out == (
        f"compiled kernels for this processor: {library}\ncompiled kernels for this processor are there: {library}\n"
    )
    assert build.main(["one"]) == 2 and build.main(["--help"]) == 0


BUILD = Path(build.__file__)


pytestmark = pytest.mark.skipif(not native.is_built(), reason="no compiled kernels: no C++ compiler, or CUDA")


def test_a_missing_compiler_is_one_line(tmp_path):
    command = [sys.executable, str(BUILD), str(native.SOURCES), str(tmp_path / "x.so")]
    done = subprocess.run(command, env={"CXX": "no-such-compiler"}, capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stdout == ("no compiled kernels, so PyTorch's operators are used: no C++ compiler no-such-compiler\n")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(BUILD), str(native.SOURCES), str(tmp_path / "file/x.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("\n") == 1 and "/file: " in done.stdout


def test_sources_that_do_not_compile_are_one_line(tmp_path):
    (tmp_path / "operators.cpp").write_text("#error broken\n")
    library = tmp_path / "x.so"
    command = [sys.executable, str(BUILD), str(tmp_path), str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "broken" in done.stdout and done.stdout.count("\n") == 1
    assert not library.exists()
