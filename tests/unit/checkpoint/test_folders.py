"""Which of a run's checkpoints is chosen, and that each of its files is read once."""

import re
from pathlib import Path

import pytest

from megarl.checkpoint import commit, folders, manifest
from megarl.errors import WARNED, UsageError
from tests.helpers.checkpoints import saved
from tests.helpers.worlds import run_world


def shares(rank: int, checkpoints: list[Path]) -> tuple:
    """(files that this rank read, damage found)."""
    read, check = [], manifest.check_content
    manifest.check_content = lambda folder, name, entry: read.append(folder / name) or check(folder, name, entry)
    return read, folders.find_damage(checkpoints)


def test_each_file_is_read_once_and_all_ranks_learn_what_is_damaged(tmp_path):
    checkpoints = [saved(tmp_path, step) for step in range(1, 6)]
    (checkpoints[3] / "tensors").write_text("!")
    found = run_world(shares, 3, checkpoints)
    assert sorted(path for read, _ in found for path in read) == [folder / "tensors" for folder in checkpoints]
    assert all(1 <= len(read) <= 2 for read, _ in found)
    expected = {checkpoints[3]: "tensors is damaged (its content does not have its checksum)"}
    assert all(damage == expected for _, damage in found)


def test_a_run_with_a_damaged_latest_uses_the_newest_intact_one(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(WARNED, raising=False)  # a launcher that other tests ran in this process may have set it
    for step in (1, 2, 3):
        saved(tmp_path, step, 3 if step == 3 else None)
    broken = folders.step_folder(tmp_path, 3)
    (broken / "tensors").unlink()
    assert folders.find(str(tmp_path), "--load") == folders.step_folder(tmp_path, 2)
    warning = f"megarl: warning: --load {broken}: tensors is missing; step_00000002 is used\n"
    assert capsys.readouterr().err == warning
    for certain in (broken, tmp_path / "checkpoints" / "latest", tmp_path / "checkpoints" / "best"):
        with pytest.raises(UsageError, match=f"^--load {broken}: tensors is missing$"):
            folders.find(str(certain), "--load")
    (folders.step_folder(tmp_path, 2) / "manifest.json").write_text("{}")
    assert folders.find(str(tmp_path), "--load") == folders.step_folder(tmp_path, 1)
    (folders.step_folder(tmp_path, 1) / "tensors").unlink()
    with pytest.raises(UsageError, match=f"^--load {broken}: tensors is missing$"):
        folders.find(str(tmp_path), "--load")


@pytest.mark.parametrize("content", [b"", b"\xff", b"step_00000009\n", b"step_000", None])
def test_a_damaged_latest_file_is_replaced_by_the_newest_one(content, tmp_path):
    saved(tmp_path, 1)
    newest, pointer = saved(tmp_path, 2), tmp_path / "checkpoints" / "latest"
    pointer.unlink() if content is None else pointer.write_bytes(content)
    assert folders.find(str(tmp_path), "--load") == newest


def test_a_half_written_folder_is_never_chosen(tmp_path):
    first = saved(tmp_path, 1)
    commit.make_room(tmp_path, "step_00000002")
    (commit.writing_folder(tmp_path, "step_00000002") / "tensors").write_text("2")
    (tmp_path / "checkpoints" / "latest").unlink()
    assert folders.find(str(tmp_path), "--load") == first
    half = folders.step_folder(tmp_path, 2)
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert folders.find(str(tmp_path), "--load") == first
    with pytest.raises(UsageError, match=f"--load {half}: .*manifest.json is missing"):
        folders.find(str(half), "--load")
    assert folders.find(str(saved(tmp_path, 3)), "--load") == folders.find(str(tmp_path), "--load")


@pytest.mark.parametrize("make", [
    lambda run: None, lambda run: run.mkdir(), lambda run: run.write_text(""),
    lambda run: (run / "checkpoints" / "latest").mkdir(parents=True),
    lambda run: ((run / "checkpoints").mkdir(parents=True), (run / "checkpoints" / "latest").write_text("gone")),
    lambda run: ((run / "checkpoints").mkdir(parents=True), (run / "checkpoints" / "latest").write_bytes(b"\xff")),
])  # fmt: skip
def test_a_path_without_a_checkpoint_is_rejected(make, tmp_path):
    make(tmp_path / "run")
    with pytest.raises(UsageError, match="^--load .*run"):
        folders.find(str(tmp_path / "run"), "--load")


@pytest.mark.parametrize(("held", "needed", "problem"), [
    ("actor.embedding.weight", "actor.hf.model.norm.weight",
     "has weights of --model-source megatron; actor has transformers"),
    ("actor.hf.model.norm.weight", "actor.embedding.weight",
     "has weights of --model-source transformers; actor has megatron"),
    ("actor.hf.model.norm.weight", "actor.hf.lm_head.weight", "has no actor.hf.lm_head.weight, which actor needs"),
    ("critic.hf.model.norm.weight", "actor.embedding.weight", "has no actor.embedding.weight, which actor needs"),
])  # fmt: skip
def test_weights_of_another_model_source_are_named(held, needed, problem, monkeypatch):
    monkeypatch.setattr(folders, "read_shapes", lambda *_: {held: (2,)})
    with pytest.raises(UsageError, match=f"^--load run: {re.escape(problem)}$"):
        folders.check_weights(Path("run"), "--load", "actor", {needed: (2,)})
