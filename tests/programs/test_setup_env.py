"""launch/setup_env.sh with fake interpreters (nothing is installed), tools/check_env.py with fake packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest

from tests.helpers.worlds import SAFETY_SECONDS

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "bash sh cat cp cut dirname find flock grep kill mkdir mv paste rm sha256sum sleep sort tail touch wc".split()

# Answers what setup_env.sh asks of an interpreter, notes every call and plays venv and pip.
FAKE = """#!/bin/sh
echo "$*" >> "{calls}"
case "$*" in
*"import sys"*) echo "{version} $0" ;;
*"-m venv "*) for dir; do :; done; mkdir -p "$dir/bin"; cp "$0" "$dir/bin/python"; touch "$dir/pyvenv.cfg" ;;
*"-m pip "*) {pip} ;;
*check_env.py*--requirements*) exec "{real}" "$@" ;;
*check_env.py*) {check} ;;
*) exit 9 ;;
esac
"""
SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
NO_ENSUREPIP = "#!/bin/sh\nprintf 'Traceback:\\nModuleNotFoundError: No module named ensurepip\\n' >&2\nexit 1\n"


class Machine:
    """A separate checkout and a PATH with only the named tools and fake interpreters."""

    def __init__(self, folder):
        self.folder, self.root, self.bin = folder, folder / "checkout", folder / "bin"
        self.calls, self.venv = folder / "calls", folder / "venv"
        self.bin.mkdir()
        for name in TOOLS:
            if shutil.which(name):
                (self.bin / name).symlink_to(shutil.which(name))
        for name in ("launch/setup_env.sh", "tools/check_env.py", "setup.py"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def program(self, name, text):
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name, version, pip=":", check=":"):
        fields = dict(calls=self.calls, version=version, pip=pip, check=check, real=sys.executable)
        return self.program(name, FAKE.format(**fields))

    def start(self, *arguments, **variables):
        environ = {"PATH": str(self.bin), "HOME": str(self.folder), "MEGARL_VENV": str(self.venv)} | variables
        command, pipe = [shutil.which("bash"), str(self.root / "launch/setup_env.sh"), *arguments], subprocess.PIPE
        return subprocess.Popen(command, env=environ, cwd=self.folder, text=True, stdout=pipe, stderr=pipe)

    def setup(self, *arguments, **variables):
        """(exit status, stdout, stderr)"""
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=SAFETY_SECONDS)
        return process.returncode, out, err

    def state(self):
        return dict(line.split("=", 1) for line in (self.venv / "megarl-env.state").read_text().split())

    def pip_calls(self):
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if "-m pip install" in line and "--target" not in line]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_failing_shims_and_old_versions_are_passed_over(machine):
    machine.python("python3", "3.11.2")
    machine.program("python3.12", SHIM)
    good = machine.python("python3.13", "3.13.4")
    assert machine.setup("--which-python") == (0, f"{good}\n", "")


@pytest.mark.parametrize("place", ["pyenv", ".pyenv"])
def test_pyenv_versions_are_found_newest_patch_of_3_12_first(machine, place):
    machine.python("python3", "3.11.2")
    for version in ("3.9.1", "3.12.9", "3.12.10", "3.13.0"):
        machine.python(f"../{place}/versions/{version}/bin/python", version)
    variables = {"PYENV_ROOT": str(machine.folder / place)} if place == "pyenv" else {}
    status, out, err = machine.setup("--which-python", **variables)
    assert (status, err) == (0, "")
    assert Path(out.strip()).resolve() == (machine.folder / place / "versions/3.12.10/bin/python").resolve()


def test_nothing_fits_names_every_candidate_and_says_what_to_do(machine):
    machine.python("python3", "3.14.0")
    machine.program("python3.12", SHIM)
    machine.program("python3.13", NO_ENSUREPIP)
    machine.python("../.pyenv/versions/3.13.1/bin/python", "3.13.1t")
    for arguments in (["--which-python"], []):
        status, out, err = machine.setup(*arguments)
        assert (status, out) == (2, "")
        assert "python3: is Python 3.14.0" in err
        assert "python3.12: does not work: pyenv: python3.12: command not found" in err
        assert "python3.13: does not work: ModuleNotFoundError: No module named ensurepip" in err
        assert "is Python 3.13.1t" in err and "pyenv install 3.12" in err and "PYTHON=/path/to/python3.12" in err
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    "name, reason", [("python3.11", "is Python 3.11.7"), ("nothing", "no such program"), ("shim", "command not found")]
)
def test_a_wrong_PYTHON_is_rejected_and_never_replaced(machine, name, reason):
    machine.python("python3", "3.12.1")
    machine.python("python3.11", "3.11.7")
    machine.program("shim", SHIM)
    status, out, err = machine.setup(PYTHON=name)
    assert (status, out) == (2, "") and f"PYTHON={name}" in err and reason in err and "3.12 or 3.13" in err
    assert not machine.venv.exists()


def test_PYTHON_wins_over_the_path_and_over_no_existing_environment(machine):
    machine.python("python3", "3.12.1")
    other = machine.python("other", "3.13.2")
    assert machine.setup("--which-python", PYTHON="other") == (0, f"{other}\n", "")
    assert machine.setup()[0] == 0
    status, out, err = machine.setup(PYTHON="other")
    assert (status, out) == (2, "") and "3.13.2" in err and "made with 3.12.1" in err


def test_first_call_installs_and_the_next_ones_call_no_pip(machine):
    machine.python("python3", "3.12.1")
    status, out, err = machine.setup("test")
    assert (status, out) == (0, f"{machine.venv}/bin/python\n"), err
    (call,) = machine.pip_calls()
    assert "megatron-core>=0.19,<0.20" in call and "pytest>=8" in call and "trl>=" not in call
    assert "--target" in machine.calls.read_text()
    for arguments in (["test"], []):
        assert machine.setup(*arguments) == (0, f"{machine.venv}/bin/python\n", "")
    assert machine.pip_calls() == [call]


def test_extras_accumulate_and_a_changed_setup_py_installs_again(machine):
    machine.python("python3", "3.12.1")
    for arguments in (["test"], ["bench"], []):
        assert machine.setup(*arguments)[0] == 0
    assert machine.state()["extras"] == "bench,test"
    assert len(machine.pip_calls()) == 2 and "pytest" in machine.pip_calls()[1] and "trl" in machine.pip_calls()[1]
    with open(machine.root / "setup.py", "a") as file:
        file.write("# changed\n")
    assert machine.setup()[0] == 0
    assert len(machine.pip_calls()) == 3 and "trl" in machine.pip_calls()[2]


def test_the_gpu_extra_builds_after_torch_is_there_and_without_isolation(machine):
    machine.python("python3", "3.12.1")
    assert machine.setup("gpu")[0] == 0
    first, tools, gpu = machine.pip_calls()
    assert "torch" in first and "transformer-engine" not in first and "ninja" in tools
    assert "--no-build-isolation" in gpu and "transformer-engine[pytorch]" in gpu


def test_only_the_checkouts_own_folder_gets_the_package(machine):
    machine.python("python3", "3.12.1")
    assert machine.setup()[0] == 0
    assert not any(f"-e {machine.root}" in call for call in machine.pip_calls())
    status, out, _ = machine.setup(MEGARL_VENV="")
    assert (status, out) == (0, f"{machine.root}/.venv/bin/python\n")
    assert machine.pip_calls()[-1].endswith(f"-e {machine.root}")


def test_a_killed_installation_is_cleared_and_made_again(machine):
    machine.python("python3", "3.12.1", pip="kill -9 $PPID")
    assert machine.setup("test")[:2] == (-9, "") and machine.state()["status"] == "installing"
    (machine.venv / "half").touch()
    machine.python("python3", "3.12.1")
    status, out, err = machine.setup()
    assert (status, out) == (0, f"{machine.venv}/bin/python\n") and "unfinished" in err
    assert machine.state()["status"] == "ready" and not (machine.venv / "half").exists()


@pytest.mark.parametrize("installs", [False, True])
def test_a_killed_completion_clears_only_what_pip_has_changed(machine, installs):
    machine.python("python3", "3.12.1")
    assert machine.setup()[0] == 0
    line = 'echo "Installing collected packages: x"; ' * installs
    machine.python("../venv/bin/python", "3.12.1", pip=f'[ ! -e "$HOME/kills" ] || {{ {line}kill -9 $PPID; }}')
    (machine.venv / "mine").touch()
    (machine.folder / "kills").touch()
    assert machine.setup("test")[:2] == (-9, "") and machine.state()["status"] == "completing"
    (machine.folder / "kills").unlink()
    status, _, err = machine.setup("test")
    assert status == 0 and machine.state()["status"] == "ready" and machine.state()["extras"] == "test"
    assert (machine.venv / "mine").exists() == (not installs) and ("unfinished" in err) == installs


def test_failing_pip_shows_the_log_and_keeps_a_working_environment(machine):
    machine.python("python3", "3.12.1", pip='[ ! -e "$HOME/broken" ] || { echo "ERROR: no disk"; exit 1; }')
    (machine.folder / "broken").touch()
    status, out, err = machine.setup()
    assert (status, out) == (1, "") and "ERROR: no disk" in err and machine.state()["status"] == "installing"
    (machine.folder / "broken").unlink()
    assert machine.setup()[0] == 0
    (machine.folder / "broken").touch()
    assert machine.setup("test")[0] == 1
    assert machine.setup() == (0, f"{machine.venv}/bin/python\n", "")


def test_problems_found_by_the_check_end_the_script_every_time(machine):
    machine.python("python3", "3.12.1", check="echo 'problem: wrong apex'; exit 1")
    for _ in range(2):
        status, out, err = machine.setup()
        assert (status, out) == (1, "") and "problem: wrong apex" in err


def test_folders_that_the_script_did_not_make_are_never_cleared(machine):
    machine.python("python3", "3.12.1")
    machine.program("../venv/thesis.tex", "mine")
    status, out, err = machine.setup()
    assert (status, out) == (2, "") and "no Python environment" in err
    (machine.venv / "pyvenv.cfg").touch()
    machine.python("../venv/bin/python", "3.12.5")
    assert machine.setup()[0] == 0 and len(machine.pip_calls()) == 1
    machine.python("../venv/bin/python", "3.12.5", pip='echo "Installing collected packages: x"; kill -9 $PPID')
    assert machine.setup("test")[0] == -9
    status, _, err = machine.setup("test")
    assert status == 2 and "did not finish" in err
    assert (machine.venv / "thesis.tex").read_text() == "mine"


def test_two_calls_at_once_install_once(machine):
    machine.python("python3", "3.12.1", pip="sleep 0.5")
    processes = [machine.start() for _ in range(2)]
    results = [(process.communicate(timeout=SAFETY_SECONDS)[0], process.returncode) for process in processes]
    assert results == [(f"{machine.venv}/bin/python\n", 0)] * 2 and len(machine.pip_calls()) == 1


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            ["tset"],
            "unknown extra 'tset', allowed: environments, gpu, math, optimizers, parquet, recurrent, serve, trackers,"
            " test, clients, bench, docs, smollm2",
        ),
        (["test", "gpu"], "usage:"),
        (["--all"], "usage:"),
    ],
)
def test_wrong_arguments(machine, arguments, line):
    machine.python("python3", "3.12.1")
    status, out, err = machine.setup(*arguments)
    assert (status, out) == (2, "") and line in err and not machine.venv.exists()


class Site:
    """A folder of fake packages that is all a separate interpreter sees besides the standard library."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "packaging").symlink_to(Path(packaging.__file__).parent)
        for line in self.check("--requirements").stdout.split():
            self.install(*line.split(",")[0].split(">="))

    def install(self, name, version):
        self.remove(name)
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def remove(self, name):
        for info in self.folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(info)

    def module(self, name, text=""):
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def check(self, *arguments):
        command = [sys.executable, "-S", str(ROOT / "tools/check_env.py"), *arguments]
        env = {"PYTHONPATH": str(self.folder)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SAFETY_SECONDS)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_check_accepts_the_lower_bounds_and_prints_versions(site):
    result = site.check()
    assert result.returncode == 0, result.stdout + result.stderr
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["megatron-core"] == "0.19" and rows["torch"] == "2.11" and rows["apex"] == "not installed"


def test_check_names_missing_and_unsuitable_packages(site):
    site.remove("einops")
    site.install("megatron-core", "0.16.1")
    result = site.check()
    assert result.returncode == 1 and "problem: einops is missing, required" in result.stdout
    assert "problem: megatron-core 0.16.1 is installed, allowed <0.20,>=0.19" in result.stdout
    site.install("megatron-core", "0.20.0")
    assert "megatron-core 0.20.0 is installed" in site.check().stdout


def test_check_asks_for_extras_only_when_named(site):
    assert site.check("--extras", "gpu").returncode == 1
    site.install("transformer-engine", "2.20.2")
    result = site.check("--extras", "gpu")
    assert result.returncode == 0 and "2.20.2" in result.stdout
    assert site.check("--extras", "tset").returncode == 2


def test_check_detects_the_wrong_apex_without_importing_it(site):
    site.module("apex/__init__.py", "raise SystemExit('imported')")
    result = site.check()
    assert result.returncode == 1 and "apex is not NVIDIA's" in result.stdout
    assert "https://github.com/NVIDIA/apex" in result.stdout
    site.module("apex/optimizers/__init__.py", "from .fused_adam import FusedAdam")
    result = site.check()
    assert result.returncode == 1 and "no CUDA extensions" in result.stdout
    site.module("amp_C.py")
    result = site.check()
    assert result.returncode == 0 and "nvidia" in result.stdout
