"""An export that is killed leaves nothing that can be loaded, not even an older export under the same name."""

import operator
import os
from pathlib import Path

import pytest

from megarl.errors import UsageError
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import build
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import RankFailed, run_world

# Functions of export_weights before whose n-th call on a rank the process is killed.
STAGES = {
    "before the transfer": ("WeightTransfer", 1),
    "before the data is flushed": ("MappedFile.flush", 1),
    "before the files get their names": ("_publish", 1),
    "before the first rename": ("os.replace", 1),
    "before the last rename": ("os.replace", 3),
}


def export(rank: int, source: Path, folder: Path, stage: str | None):
    """Exports; kills the process at a stage."""
    from megarl.mcore.weights.hf import export_weights as module

    _, groups, model, weights = build(source, "", False)
    if stage is not None:
        _kill_before(module, *STAGES[stage])
    module.export_weights(weights.weight_map, model, groups.pg_collection, folder)


def _kill_before(module, path: str, number: int):
    owners, _, name = path.rpartition(".")
    owner = operator.attrgetter(owners)(module) if owners else module
    original, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            os._exit(9)
        return original(*args, **kwargs)

    setattr(owner, name, killed)


def is_loadable(folder: Path) -> bool:
    from megarl.mcore.weights.hf.folder import HFFolder

    try:
        return bool(HFFolder(folder).tensors)
    except UsageError:
        return False


@pytest.mark.parametrize("over_an_older_one", [long(False), True])
@pytest.mark.parametrize("stage", by_default(STAGES, ("before the transfer", "before the last rename")))
def test_a_killed_export_cannot_be_loaded(stage, over_an_older_one, tmp_path):
    source, folder = hf_folders.write_folder("qwen3", tmp_path / "hf", files=2), tmp_path / "export"
    if over_an_older_one:
        run_world(export, 1, source, folder, None)
        assert is_loadable(folder)
    with pytest.raises(RankFailed):
        run_world(export, 1, source, folder, stage)
    assert not is_loadable(folder)
    run_world(export, 1, source, folder, None)  # the next one repairs it
    assert is_loadable(folder) and not list(folder.glob("*.partial"))


def test_a_single_file_gets_its_name_last(tmp_path):
    source, folder = hf_folders.write_folder("qwen3", tmp_path / "hf"), tmp_path / "export"
    with pytest.raises(RankFailed):
        run_world(export, 1, source, folder, "before the first rename")
    assert not is_loadable(folder) and (folder / "config.json").exists()


def test_a_folder_is_not_exported_onto_itself(tmp_path):
    source = hf_folders.write_folder("qwen3", tmp_path / "hf")
    with pytest.raises(RankFailed, match="must not overwrite the folder that the model came from"):
        run_world(export, 1, source, source, None)
    assert is_loadable(source)
