"""Settings of the test process: one thread, no CUDA device, so that worlds of ranks can be forked from it.

A forked child hangs in a thread pool that its parent has started, and cannot use a CUDA device that its parent has
touched. Tests of a CUDA device start their own processes.
"""

import contextlib
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: OpenMP reads it once
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of theirs, likewise
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # and of pyarrow's
os.environ["TRITON_INTERPRET"] = "1"  # kernels for CUDA run on the CPU; read when triton is imported

import pytest
import torch

from megarl.confine import sandbox
from tests.helpers import programs, worlds

torch.set_num_threads(1)
# What a killed process has written is in files all the same: only a machine without power would lose it. A checkpoint
# asks for 20 of them, a sixth of a small program's time.
os.fsync = lambda descriptor: None
with contextlib.suppress(ImportError):  # tools/te_check.sh has none
    import hypothesis

    # The same examples in each run, however long one takes.
    hypothesis.settings.register_profile("megarl", deadline=None, derandomize=True, database=None,
                                         suppress_health_check=[hypothesis.HealthCheck.too_slow])  # fmt: skip
    hypothesis.settings.load_profile("megarl")
gc.disable()  # until tests are collected: a fourth of the time of imports


def pytest_configure(config):
    """Ignores Megatron's warnings about itself, since pytest's filters replace megarl's."""
    config.addinivalue_line("filterwarnings", "ignore::Warning:megatron")
    config.addinivalue_line("filterwarnings", "ignore:'type' is deprecated:DeprecationWarning:argparse")


def pytest_addoption(parser):
    parser.addoption("--jobs", type=int, default=1, help="processes that share the tests, file by file")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """With --jobs, forks this process when tests are collected, which takes longest; each fork reports at its end.

    This process runs none itself: a test looks at its process's descendants, which must be its own.
    """
    jobs = session.config.getoption("--jobs")
    if jobs == 1 or session.testsfailed or session.config.option.collectonly:
        return None
    if programs.inputs.cache_info().currsize:
        raise pytest.UsageError("a module calls programs.inputs() when it is imported: forks would share the folder")
    with warnings.catch_warnings(action="ignore"):  # of packages; a test would ignore them, too
        worlds.warm()
        programs.made_inputs()
    folder, forks = Path(tempfile.mkdtemp(prefix="megarl-jobs-")), {}
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    for number in range(jobs):
        printed = folder / f"printed.{number}"
        reporter.flush()
        pid = os.fork()
        if pid == 0:
            worlds.die_with_parent()
            if number:  # the first one's progress is seen
                reporter._tw._file = printed.open("w", buffering=1)
            _capture_anew(session.config.pluginmanager.getplugin("capturemanager"))
            return _run_claimed(session, folder)
        forks[pid] = printed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the forks get it, too, and their reports belong to the whole
    for pid, printed in forks.items():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report = printed.read_text() if printed.exists() else ""
        reporter.write(f"\n{report}\na process of --jobs ended with status {status}\n", flush=True)
        session.testsfailed += status != 0
    shutil.rmtree(folder)
    return True


def _capture_anew(manager):
    """Gives a fork files of its own for what tests print, in the state in which pytest runs tests."""
    manager.stop_global_capturing()
    manager.start_global_capturing()
    manager.suspend_global_capture()


def _run_claimed(session, folder: Path) -> bool:
    """Runs the tests of the files that no other process has claimed, file by file, as pytest would; the tests on
    emulated devices together, whose process takes long to start."""
    files = itertools.groupby(session.items, lambda item: "emulator" if "emulator" in item.fixturenames else item.path)
    mine = (item for path, items in files if _claims(folder, path) for item in items)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _claims(folder: Path, file: Path | str) -> bool:
    """Whether this process has claimed a test file, or that name, before all others."""
    claim = folder / str(file).replace("/", ":")
    try:
        with claim.open("x") as owner:
            owner.write(str(os.getpid()))
    except FileExistsError:
        return claim.read_text() == str(os.getpid())  # tests on emulated devices are in several files
    return True


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests of the code verifier's sandbox if the machine forbids one, with a warning; those that need a
    process with one thread come first."""
    items.sort(key=lambda item: item.get_closest_marker("one_thread") is None)
    marked = [item for item in items if item.get_closest_marker("sandbox")]
    reason = sandbox.available() if marked else None
    if reason:
        warnings.warn(f"{len(marked)} tests of the sandbox are left out: {reason}", stacklevel=1)
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


def pytest_collection_finish():
    """Keeps what imports and collection have made out of every later collection of garbage, here and in forks."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_not_collected_again():
    """What earlier files have left is out of every later collection: a full one took 0.7 s at the end of a tier, and a
    forked rank copied each page that its collections touched."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def without_collection():
    """For tests that parse many files: no collection of garbage finds any among the nodes of syntax."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the runs of a file's tests are."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def own_environment():
    """Undoes what the launcher, run in this process, writes into the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def plug_ins(tmp_path, monkeypatch):
    """A folder on the import path; its modules are unloaded after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
