"""The package as others install it: from a source archive to a wheel to an environment without the repository."""

import os
import runpy
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from fnmatch import fnmatch
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import megarl
from tests.helpers.programs import ROOT
from tests.helpers.worlds import SAFETY_SECONDS

pytestmark = pytest.mark.nightly

BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"
SMALL = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --num-query-groups 1"
    " --train-iters 1 --lr-warmup-iters 0 --eval-samples 4"
)
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="requirements")
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | {
    name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ
}


def run(*command, folder: Path, **variables: str):
    """A command in a folder, with no variable of the repository; output as text."""
    return subprocess.run(
        list(map(str, command)), cwd=folder, env={**VARIABLES, **variables}, capture_output=True, text=True,
        timeout=SAFETY_SECONDS,
    )  # fmt: skip


def checked(*command, folder: Path) -> str:
    """Output of a command that succeeds."""
    done = run(*command, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What .gitignore names, and the repository itself.
NO_SOURCE = (
    ".git",
    ".venv",
    "runs",
    "build",
    "dist",
    "site",
    "*.egg-info",
    ".hypothesis",
    "__pycache__",
    "*.pyc",
    ".*_cache",
)


def files_below(folder: Path, beside: Path) -> set[str]:
    """Names of the source files below a folder, relative to another one."""
    found = (path.relative_to(beside) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if not any(fnmatch(part, name) for part in path.parts for name in NO_SOURCE)}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The source archive, made from a copy of the repository's folder, and unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    copytree(ROOT, folder / "source", ignore=ignore_patterns(*NO_SOURCE))
    checked(sys.executable, "-c", BUILD.format("build_sdist"), folder, folder=folder / "source")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (found,) = (folder / "unpacked").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(unpacked) -> Path:
    """The wheel, made from the source archive."""
    checked(sys.executable, "-c", BUILD.format("build_wheel"), unpacked.parent, folder=unpacked)
    (found,) = unpacked.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs `megarl` of an environment with the wheel; its dependencies are those of the tests. In an empty folder."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", symlinks=True)
    (packages,) = folder.glob("env/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))  # not editable installs in them
    pip = [sys.executable, "-m", "pip", "--python", folder / "env/bin/python", "install", "--no-deps", "--no-index"]
    checked(*pip, "--disable-pip-version-check", wheel, folder=folder)
    work = folder / "work"
    work.mkdir()
    return lambda *arguments, **variables: run(folder / "env/bin/megarl", *arguments, folder=work, **variables)


def test_the_source_archive_is_the_checkout(unpacked):
    """So that launch/quickstart.sh and tests/run.sh run from it."""
    found = files_below(unpacked, unpacked)
    assert found - {"PKG-INFO", "setup.cfg"} == files_below(ROOT, ROOT)
    assert os.access(unpacked / ".ci/run", os.X_OK)


def test_the_wheel_has_all_of_the_package_and_what_it_needs_from_the_repository(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/") and ".dist-info/" not in name}
    own = {name for name in names if not name.startswith("megarl/_bundle/")}
    assert own == files_below(ROOT / "megarl", ROOT) and "megarl/mcore/kernels/native/src/operators.cpp" in own
    tools = {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    assert set(SETUP["REPOSITORY_TOOLS"]) < {Path(name).stem for name in tools}
    tools -= {f"tools/{name}.py" for name in SETUP["REPOSITORY_TOOLS"]}
    bundle = {name.removeprefix("megarl/_bundle/") for name in names - own}
    assert bundle == files_below(ROOT / "configs", ROOT) | tools | {"tools/__init__.py"}


def test_the_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(file.read(name))
    assert metadata["Version"] == megarl.__version__ and metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert metadata["Requires-Python"] == SETUP["PYTHON_REQUIRES"] and metadata["Description-Content-Type"]
    assert metadata.get_payload().startswith("# megarl\n")
    assert set(metadata.get_all("Provides-Extra")) == set(SETUP["EXTRAS"])
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(plain) == len(SETUP["INSTALL_REQUIRES"])


def test_the_environment_has_the_wheel_and_not_the_repository(installed):
    done = installed("--version")
    assert done.stdout.startswith(f"megarl {megarl.__version__} (Python 3.") and "not installed" not in done.stdout
    assert "_bundle/configs; `--config configs/...`" in installed("--help").stdout
    assert str(ROOT) not in installed("--help").stdout


def test_the_quickstart_runs_from_the_wheel(installed):
    """The commands of docs/install.md, with a smaller model and one step of each."""
    prompts = "--task basic_arithmetic --train 64 --heldout 8 --out runs/quickstart/data --prompt-template"
    options = 'operators=["+"] allow_parentheses=false min_terms=2 max_terms=2 min_digits=1 max_digits=2'
    flags = [token for option in options.split() for token in ("--task-option", option)]
    done = installed("make_prompts", *prompts.split(), "{metadata[expression]} =", *flags)
    assert done.stdout == "runs/quickstart/data: 64 train and 8 held-out prompts, no question in both\n", done.stderr
    tokenizer = "--input runs/quickstart/data/train.jsonl --vocab-size 32 --out runs/quickstart/data/tokenizer"
    assert "pieces from" in installed("train_tokenizer", *tokenizer.split()).stdout
    sft = installed("--nproc-per-node", "1", "train_sft", "--config", "configs/quickstart_sft.yaml", *SMALL.split())
    assert sft.returncode == 0 and "| eval loss" in sft.stdout, sft.stderr
    first = next(line for line in sft.stdout.splitlines() if line.startswith("megarl: kernels: "))
    assert "(no compiled kernels; `python -m megarl build_kernels` makes them" in first
    configs = "--config configs/quickstart.yaml configs/recipes/grpo.yaml"
    small = "--prompts-per-step 4 --samples-per-prompt 2 --minibatch-size 8"
    rl = installed("--nproc-per-node", "2", "train_rl", *configs.split(), *SMALL.split(), *small.split())
    assert rl.returncode == 0 and "| reward" in rl.stdout, rl.stderr


def test_without_a_compiler_one_line_says_so(installed):
    done = installed("build_kernels", CXX="no-such-compiler")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout == "no compiled kernels, so PyTorch's operators are used: no C++ compiler no-such-compiler\n"


def test_every_tool_of_the_wheel_starts(installed):
    """In one process, since each imports torch."""
    source = (
        "import contextlib, io, sys; from megarl import __main__, bundled\n"
        "for name in bundled.tools():\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as printed:\n"
        "        status = __main__.main([name, '--help'])\n"
        "    print(name, status, f'python tools/{name}.py' in printed.getvalue() or 'usage: ' in printed.getvalue())"
    )
    python = Path(installed("--help").args[0]).with_name("python")
    lines = checked(python, "-c", source, folder=python.parent).splitlines()
    assert len(lines) > 4 and [line for line in lines if not line.endswith(" 0 True")] == []
