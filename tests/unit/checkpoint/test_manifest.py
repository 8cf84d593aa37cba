"""A damaged checkpoint is found: any flipped byte, a truncated, missing or unknown file; and what is chosen instead."""

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint import folders, manifest
from megarl.errors import UsageError
from tests.helpers.checkpoints import WAITING
from tests.helpers.programs import rl_argv, train
from tests.helpers.worlds import run_world

FLIPS = 400


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with every kind of file: policy, optimizer states, frozen reference, waiting and unfinished groups."""
    folder = tmp_path_factory.mktemp("integrity") / "run"
    train("rl", rl_argv(folder, f"{WAITING} --train-iters 1"))
    return folder


def files_of(checkpoint: Path) -> list[Path]:
    """All files of a checkpoint and of the frozen weights that it names."""
    entries = folders.read_manifest(checkpoint, "--load")
    held = [checkpoint, folders.frozen_folder(checkpoint, entries, "reference", "--load")]
    return [path for folder in held for path in sorted(folder.iterdir())]


def problem(checkpoint: Path) -> str:
    """What a program finds wrong with a checkpoint; "" if nothing."""
    try:
        entries = folders.check(checkpoint, "--load")
        folders.check(folders.frozen_folder(checkpoint, entries, "reference", "--load"), "--load")
        return "".join(folders.find_damage([checkpoint]).values())
    except UsageError as error:
        return str(error)


def flipped(path: Path, position: int, bit: int):
    """Flips one bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def undetected_flips(rank: int, checkpoint: Path, count: int) -> tuple[int, list]:
    """(flips, those that no check found or whose message does not name the file)."""
    files, draw, missed, flips = files_of(checkpoint), random.Random(7), [], 0
    assert problem(checkpoint) == ""
    for path in files:
        for _ in range(count // len(files)):
            position, bit, flips = draw.randrange(path.stat().st_size), draw.randrange(8), flips + 1
            flipped(path, position, bit)
            if path.name not in problem(checkpoint):
                missed.append((path.name, position, bit))
            flipped(path, position, bit)
    assert problem(checkpoint) == ""
    return flips, missed


def test_every_flipped_bit_is_detected(run):
    checkpoint = folders.step_folder(run, 1)
    names = {path.name for path in files_of(checkpoint)}
    assert names == {".metadata", "__0_0.distcp", "manifest.json", "metadata.json", "rollout_00000.log"}
    ((flips, missed),) = run_world(undetected_flips, 1, checkpoint, FLIPS)
    assert flips >= 300 and not missed


def damaged_files(rank: int, checkpoint: Path, copy: Path) -> list:
    """The damages of whole files that no check found."""
    missed = []
    for path in files_of(checkpoint):
        for name, damage in {
            "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "empty": lambda path: path.write_bytes(b""),
            "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
            "missing": lambda path: path.unlink(),
            "unknown": lambda path: path.with_name("common.pt").write_bytes(b""),
        }.items():
            shutil.copytree(checkpoint.parent, copy)
            damage(copy / path.relative_to(checkpoint.parent))
            named = "common.pt" if name == "unknown" else path.name
            if named not in problem(copy / checkpoint.name):
                missed.append((name, path))
            shutil.rmtree(copy)
    return missed


def test_truncated_missing_and_unknown_files_are_detected(run, tmp_path):
    assert run_world(damaged_files, 1, folders.step_folder(run, 1), tmp_path / "copy") == [[]]


def test_a_checkpoint_without_its_frozen_weights_says_which_to_copy(run, tmp_path):
    copy = shutil.copytree(folders.step_folder(run, 1), tmp_path / "step_00000001")
    entries = folders.check(copy, "--load")  # enough for its policy
    digest = entries["frozen"]["reference"]
    with pytest.raises(UsageError, match=f"--load {copy}: .* frozen/{digest} beside it, which is missing; copy it"):
        folders.frozen_folder(copy, entries, "reference", "--load")


# -- manifests that were made by hand, with the right checksum ---------------------------------------------------

FILE = {"size": 3, "sha256": "0" * 64}
WRONG = {
    "files numbers": {"files": {"a.pt": 3}}, "files a list": {"files": ["a.pt"]}, "files null": {"files": None},
    "file elsewhere": {"files": {"../a.pt": FILE}}, "file absolute": {"files": {"/etc/passwd": FILE}},
    "file the folder": {"files": {"..": FILE}}, "size a text": {"files": {"a.pt": FILE | {"size": "3"}}},
    "size true": {"files": {"a.pt": FILE | {"size": True}}}, "size negative": {"files": {"a.pt": FILE | {"size": -1}}},
    "checksum a number": {"files": {"a.pt": FILE | {"sha256": 3}}}, "step a text": {"step": "1"},
    "step 1.5": {"step": 1.5},
    "step huge": {"step": 10**400}, "step negative": {"step": -1}, "program a list": {"program": []},
    "frozen elsewhere": {"frozen": {"reference": "../../elsewhere"}}, "frozen a list": {"frozen": [1]},
    "frozen a number": {"frozen": {"reference": 1}}, "frozen null": {"frozen": None}, "lora a text": {"lora": "x"},
    "lora of nothing": {"lora": {"actor": {}}}, "data numbers": {"data": {"prompts": 1}}, "data null": {"data": None},
    "settings a list": {"settings": [1]}, "schedules numbers": {"schedules": {"actor": 3}},
    "multipliers": {"schedules": {"actor": {"lr_multipliers": ["*=x"]}}},
    "a frozen number": {"optimizers": {"actor": {"optimizer": "adam", "freeze": [1]}}},
    "order a list": {"prompt_order": [1]}, "order of texts": {"prompt_order": {"position": "1", "size": 3}},
    "groups null": {"waiting_groups": None}, "groups of texts": {"waiting_groups": {"complete": "1"}},
    "best a text": {"best": "step_1"}, "reward NaN": {"reward": {"count": float("nan"), "mean": 0, "squares": 0}},
    "world size a list": {"world_size": [2]}, "layout a text": {"layout": "x"}, "role a number": {"role": 1},
}  # fmt: skip


def sealed(checkpoint: Path, entries: dict) -> Path:
    """A checkpoint with other entries in its manifest, and the checksum that belongs to them."""
    found = manifest.read(checkpoint, "--load")
    manifest.write(checkpoint, found | entries)
    return checkpoint


@pytest.fixture
def copied(run, tmp_path) -> Path:
    """A checkpoint that a test may change."""
    return shutil.copytree(run / "checkpoints", tmp_path / "checkpoints") / "step_00000001"


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_made_by_hand_is_refused_in_one_line(name, copied):
    said = problem(sealed(copied, WRONG[name]))
    (entry,) = WRONG[name]
    assert said == f"--load {copied}: manifest.json is damaged ({entry} is not what megarl writes)"


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, "null", "3", "", "\xff"])
def test_a_manifest_that_is_none_is_refused_in_one_line(text, copied):
    (copied / "manifest.json").write_text(text)
    said = problem(copied)
    assert said.startswith(f"--load {copied}: manifest.json is damaged (") and "\n" not in said


def test_the_newest_one_that_can_be_read_takes_the_place_of_a_hostile_one(run, tmp_path, capsys):
    checkpoints = shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    hostile = shutil.copytree(checkpoints / "step_00000001", checkpoints / "step_00000002")
    sealed(hostile, {"files": {"a.pt": 3}})
    (checkpoints / "latest").write_text("step_00000002\n")
    assert folders.find(str(tmp_path / "run"), "--load") == checkpoints / "step_00000001"
    assert "files is not what megarl writes); step_00000001 is used" in capsys.readouterr().err
    (checkpoints / "latest").write_text("../../elsewhere\n")
    assert folders.find(str(tmp_path / "run"), "--load") == checkpoints / "step_00000001"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=5,
)  # fmt: skip


@given(name=st.sampled_from(sorted(manifest.ENTRIES)), value=JSON)
def test_any_value_of_an_entry_fits_or_does_not(name, value):
    assert manifest.wrong_entry({name: value}) in (None, name)
