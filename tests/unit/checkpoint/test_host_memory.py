"""Checkpoints in host memory: room, whose folder it is, what nodes pass on and what they recover together."""

import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megarl import launcher
from megarl.checkpoint import commit, folders, host_memory, manifest
from megarl.data import node_files
from megarl.errors import UsageError
from megarl.observe.files import write_atomically
from tests.helpers.checkpoints import saved
from tests.helpers.programs import program, rl_argv
from tests.helpers.worlds import SAFETY, run_world

TOKEN = "0123456789abcdef" * 2
FILES = {"rank-0": b"a" * 5, "rank-1": b"", "rank-2": b"c" * 23, "more": b"m"}


@pytest.fixture
def memory(monkeypatch):
    with tempfile.TemporaryDirectory(dir=host_memory.DEFAULT) as folder:
        monkeypatch.setenv(host_memory.ROOT, folder)
        yield Path(folder)


def in_memory(run: Path, token: str = TOKEN) -> Path:
    """Makes a run's folder in memory."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_atomically(run / "checkpoints" / host_memory.POINTER, f"{token}\n")
    folder = node_files.private_folder(host_memory._base()) / token
    host_memory._make(folder, run)
    return folder


def written(folder: Path, step: int, files: dict[str, bytes], whole: dict[str, bytes]) -> Path:
    """A step of which this node has `files`, of `whole`."""
    name = folders.step_folder(folder, step).name
    commit.make_room(folder, name)
    writing = commit.writing_folder(folder, name)
    for file, data in whole.items():
        (writing / file).write_bytes(data)
    seals = {file: manifest.seal(writing / file) for file in whole}
    for file in whole.keys() - files.keys():
        (writing / file).unlink()
    commit.commit_alone(folder, step, {"program": "test", "world_size": 3}, seals)
    return folders.step_folder(folder, step)


# -- which checkpoint a run goes on from -----------------------------------------------------------------------------


@pytest.mark.parametrize(("on_disk", "held", "found"), [
    ([1, 3], [2], (3, "disk")), ([1, 3], [3], (3, "memory")), ([1], [3], (3, "memory")), ([], [3], (3, "memory")),
    ([1], [], (1, "disk")),
])  # fmt: skip
def test_the_newest_of_disk_and_memory_is_found(on_disk, held, found, tmp_path, memory):
    run, folder = tmp_path / "run", in_memory(tmp_path / "run")
    for step in on_disk:
        saved(run, step)
    for step in held:
        saved(folder, step)
    host_memory.attach(str(run))
    place = {"disk": run, "memory": folder}[found[1]]
    assert folders.find(str(run), "--load") == folders.step_folder(place, found[0])
    assert folders.is_of_run(folders.step_folder(place, found[0]), run)
    host_memory.forget(run)
    host_memory.attach(str(run))
    assert folders.in_memory(run) == []


def test_a_damaged_checkpoint_in_memory_leaves_the_disk(tmp_path, memory, capfd):
    run, folder = tmp_path / "run", in_memory(tmp_path / "run")
    disk, held = saved(run, 2), saved(folder, 5)
    host_memory.attach(str(run))
    assert folders.how_to_resume(str(run)) == f" (saved: step 5, in host memory); resume with --load {run}"
    (held / "tensors").write_text("longer")
    assert folders.find(str(run), "--load") == disk
    assert capfd.readouterr().err.endswith(
        f"{held}: tensors has 6 bytes, and was written with 1; step_00000002 is used\n"
    )
    host_memory.attach(str(run), only_whole=True)
    assert folders.how_to_resume(str(run)) == f" (saved: step 2); resume with --load {run}"


def opened(rank: int, run: Path, resumed: Path | None) -> list:
    host_memory.attach(str(run))
    folder, nodes = host_memory.open_folder(run, resumed)
    dist.barrier()
    return [folder, nodes, node_files.is_in_use(folder)]


def test_a_start_keeps_what_it_resumes_from_and_removes_the_rest(tmp_path, memory):
    run, folder = tmp_path / "run", in_memory(tmp_path / "run")
    kept, gone = saved(folder, 5), saved(folder, 4)
    others = [in_memory(tmp_path / name, token * 32) for name, token in (("lives", "1"), ("gone", "2"), ("ended", "3"))]
    shutil.rmtree(tmp_path / "gone")
    host_memory.forget(tmp_path / "ended")
    assert run_world(opened, 2, run, kept) == [[folder, [[0, 1]], True]] * 2
    assert kept.exists() and not gone.exists() and [other.exists() for other in others] == [True, False, False]
    assert (kept.parent / folders.FROZEN).readlink() == run / "checkpoints" / folders.FROZEN
    (other, *_), _ = run_world(opened, 2, run, saved(run, 3))
    assert other != folder and not folder.exists() and host_memory._token(run) == other.name


def test_a_run_with_nothing_left_to_do_leaves_nothing_on_any_node(tmp_path, memory, monkeypatch):
    run, folder = tmp_path / "run", in_memory(tmp_path / "run")
    monkeypatch.setenv("LOCAL_RANK", "1")
    host_memory.discard(run)
    assert folder.exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    host_memory.discard(run)
    host_memory.discard(tmp_path)  # which has none
    assert not folder.exists()


# -- room ------------------------------------------------------------------------------------------------------------


def config(save: Path, flags: str = "", ranks: int = 1):
    return program("rl", rl_argv(save, f"--save-memory {flags}"), ranks)


def test_what_is_needed_covers_what_is_written_and_nodes_divide_it(tmp_path):
    flags = "--advantage grpo --use-distributed-optimizer"
    alone, of_two = config(tmp_path, flags, 1), config(tmp_path, flags, 2)
    whole = host_memory.needed(alone, 20, 0, 1, 1) - 2 * host_memory.OF_RANK
    both = host_memory.needed(of_two, 20, 0, 2, 2) - 4 * host_memory.OF_RANK
    own = host_memory.needed(of_two, 20, 1, 1, 2) - 4 * host_memory.OF_RANK
    assert whole == both and whole < own < 2 * whole  # a node has half of the states, and all weights, of two nodes
    average = host_memory.needed(config(tmp_path, f"{flags} --ema-decay 0.9"), 20, 0, 1, 1) - 2 * host_memory.OF_RANK
    assert average == whole * 20 / 16  # of a weight: 4 of itself, 12 of states, 4 of the average


@pytest.mark.parametrize("case", ["a disk", "a file", "a full tmpfs", "full memory", "open to others"])
def test_too_little_room_is_refused_in_one_line(case, tmp_path, memory, monkeypatch):
    reason = "the checkpoints of a node take up to .* MB|the checkpoints of a node take up to .* GB, and .* are free"
    if case in ("a disk", "a file"):
        reason = "is no folder of a tmpfs"
        place = tmp_path if case == "a disk" else memory / "file"
        (memory / "file").touch()
        monkeypatch.setenv(host_memory.ROOT, str(place))
    elif case == "a full tmpfs":
        monkeypatch.setattr(host_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    elif case == "full memory":
        monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    else:
        reason = "cannot be used"
        host_memory._base().mkdir(mode=0o777)
        host_memory._base().chmod(0o777)
    with pytest.raises(UsageError, match=f"^--save-memory: .*({reason})") as error:
        host_memory.check_room(config(tmp_path / "run"), 20)
    assert "\n" not in str(error.value)


def test_what_the_run_itself_and_ended_runs_have_counts_as_free(tmp_path, memory, monkeypatch):
    parsed = config(tmp_path / "run")
    needed = host_memory.needed(parsed, 20, 0, 1, 1)
    monkeypatch.setattr(host_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 50))
    other = in_memory(tmp_path / "other", "1" * 32)
    (other / "checkpoints" / "data").write_bytes(b"x" * 100)
    with pytest.raises(UsageError, match=f"; {other} has "):
        host_memory.check_room(parsed, 20)
    host_memory.forget(tmp_path / "other")
    host_memory.check_room(parsed, 20)


# -- several nodes ---------------------------------------------------------------------------------------------------

NODES = [[0, 1], [2], [3]]


def passed_on(rank: int, folder: Path, blocked: int | None) -> str | None:
    host_memory.CHUNK = 7
    own = folder / f"node-{next(i for i, node in enumerate(NODES) if rank in node)}"
    own.mkdir(exist_ok=True)
    names = {0: ["zero", "empty"], 1: ["one"], 2: ["two"], 3: ["three", "more three"]}
    for name in names[rank]:
        (own / name).write_bytes(b"" if name == "empty" else name.encode() * (rank + 3))
    of_ranks: list = [None] * 4
    dist.all_gather_object(of_ranks, {name: manifest.seal(own / name) for name in names[rank]})
    if rank == blocked:
        (own / "three").mkdir()  # which the next node sends
    try:
        host_memory.pass_on(own, NODES, of_ranks, {"meta": b"data"}, dist.group.WORLD)
    except OSError as error:
        return type(error).__name__
    finally:
        dist.barrier()  # ranks of a node write into one folder
    for name, seal in {name: seal for of_rank in of_ranks for name, seal in of_rank.items()}.items():
        assert not (own / name).exists() or manifest.check_content(own, name, seal) is None
    return None


def test_nodes_of_unequal_size_have_their_files_and_those_of_the_next(tmp_path):
    assert run_world(passed_on, 4, tmp_path, None) == [None] * 4
    found = {path.name: {file.name for file in path.iterdir()} for path in tmp_path.iterdir()}
    zero, two, three = {"zero", "empty", "one"}, {"two"}, {"three", "more three"}
    assert found == {"node-0": zero | two, "node-1": two | three | {"meta"}, "node-2": three | zero | {"meta"}}


def test_a_node_that_cannot_write_fails_after_all_has_been_sent(tmp_path):
    assert run_world(passed_on, 4, tmp_path, 2) == [None, None, "IsADirectoryError", None]


def ring(node: int) -> dict[str, bytes]:
    return {name: FILES[name] for name in (f"rank-{node}", f"rank-{(node + 1) % 3}", "more")}


def recovered(run: Path, memory: Path, happens) -> list[list[str] | None]:
    """The files of step 4 on each of three nodes when all have recovered; None: the step is gone."""

    def node() -> int:
        number = int(os.environ["RANK"])
        folder = memory / str(number)
        folder.mkdir()
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", host_memory.ROOT: str(folder)}
        place = in_memory(run)
        written(place, 3, {}, {"old": b""})
        step = written(place, 4, ring(number), FILES)
        happens(number, step)
        host_memory.recover(run, SAFETY)
        held = {path.name for path in step.parent.glob("step_*")}
        assert held <= {step.name}
        if held:
            found = {path.name: path.read_bytes() for path in step.iterdir() if path.name != folders.MANIFEST}
            assert found == FILES and manifest.check_sizes(step, folders.read_manifest(step, "")) is None
        (memory / f"held-{number}").write_text(" ".join(held))
        return 0

    assert launcher.run_ranks(node, 3) == 0
    return [(memory / f"held-{number}").read_text() for number in range(3)]


def changed(step: Path, name: str):
    (step / name).write_bytes(FILES[name].replace(b"c", b"d"))


STEP = "step_00000004"
LOST = {  # what happens on (node, its step), whether the step is there afterwards, what is said
    "nothing": (lambda node, step: None, True, ""),
    "a node": (lambda node, step: node == 1 and shutil.rmtree(step.parents[2]), True, ""),
    "a copy": (lambda node, step: node == 1 and changed(step, "rank-2"), True, "rank-2 is damaged"),
    "both copies": (lambda node, step: node > 0 and changed(step, "rank-2"), False, "no node has rank-2 whole"),
    "two nodes": (lambda node, step: node > 0 and shutil.rmtree(step.parents[1]), False, "no node has rank-2 whole"),
    "all": (lambda node, step: shutil.rmtree(step.parents[1]), False, ""),
    "manifests that differ": (lambda node, step: node == 2 and written(step.parents[1], 4, ring(2), FILES | {"x": b""}),
                              False, "its nodes have different ones"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
@pytest.mark.one_thread
def test_nodes_recover_the_newest_step_that_they_have_together(case, tmp_path, memory, capfd):
    happens, is_there, said = LOST[case]
    assert recovered(tmp_path / "run", memory, happens) == [STEP * is_there] * 3
    printed = capfd.readouterr().err
    assert said in printed and (said or not printed)


@pytest.mark.one_thread
def test_a_later_step_of_the_disk_is_not_copied(tmp_path, memory):
    saved(tmp_path / "run", 5)
    assert recovered(tmp_path / "run", memory, lambda node, step: None) == [""] * 3


@pytest.mark.one_thread
def test_a_node_without_room_leaves_the_disk(tmp_path, memory, capfd):
    def fill(node: int, step: Path):
        if node == 0:
            host_memory.shutil.disk_usage = lambda path: SimpleNamespace(free=1)

    assert recovered(tmp_path / "run", memory, fill) == [""] * 3
    assert "node 0 has no room for all files" in capfd.readouterr().err


def test_one_node_or_a_run_without_memory_has_nothing_to_recover(tmp_path, monkeypatch):
    in_memory_of = tmp_path / "run"
    monkeypatch.setattr(host_memory.role_mesh, "meet", lambda timeout: pytest.fail("the ranks would wait"))
    host_memory.recover(in_memory_of, timedelta(seconds=1))
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    host_memory.recover(in_memory_of, timedelta(seconds=1))
