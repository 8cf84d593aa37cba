"""Files of checkpoints: a save in two parts has its checksums, and the snapshot; none that is read can run code."""

import functools
import io
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megarl.checkpoint import folders, manifest
from megarl.errors import UsageError
from megarl.mcore.weights import dist_checkpoint
from megarl.rollout import response_log, waiting_groups
from megarl.rollout.response_log import Record
from tests.helpers.checkpoints import WAITING, Attack
from tests.helpers.programs import in_world, program, rl_argv, train
from tests.helpers.worlds import run_world


def planned_and_written(rank: int, folder: Path) -> dict[str, dict]:
    """What the rank says about its files; the tensors change between the snapshot and the writing."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megarl.mcore.weights.checkpoint_files import plan_save

    weights = torch.arange(6.0)
    state = {"w": ShardedTensor.from_rank_offsets("w", weights, (0, rank, 2))}
    planned = plan_save(state, folder)
    planned.snapshot(state)
    weights.fill_(-1)
    results, sealed = planned.write()
    gathered: list = [None] * 2
    torch.distributed.all_gather_object(gathered, results)
    if rank == 0:
        planned.finish(gathered)
    return sealed


def test_files_have_their_checksums_and_the_snapshot(tmp_path):
    found = run_world(planned_and_written, 2, tmp_path)
    assert all(found) and not found[0].keys() & found[1].keys()
    for name, entry in (found[0] | found[1]).items():
        assert manifest.seal(tmp_path / name) == entry
    stored = b"".join((tmp_path / name).read_bytes() for name in found[1])
    assert torch.arange(6.0).numpy().tobytes() in stored


# -- hostile files -------------------------------------------------------------------------------------------------


def test_the_attack_works_on_an_unrestricted_reader(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with groups that wait for their batch, and unfinished groups."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    train("rl", rl_argv(folder, WAITING + " --train-iters 1"))
    return folder


def test_a_file_that_cannot_be_read_is_an_error_that_programs_report(monkeypatch, tmp_path):
    """torch's own is no Exception."""

    def fail(*_, **__):
        raise CheckpointException("read", {1: (OSError(24, "Too many open files"), None)})

    monkeypatch.setattr(dist_checkpoint.dist_checkpointing, "load", fail)
    with pytest.raises(RuntimeError) as caught:
        dist_checkpoint.load({}, tmp_path)
    assert str(caught.value) == f"{tmp_path}: rank 1 cannot read it: OSError: [Errno 24] Too many open files"


def sealed(folder: Path):
    """Gives a changed checkpoint a manifest that fits, as an attacker would."""
    entries = manifest.read(folder, "--load")
    entries["files"] = {path.name: manifest.seal(path) for path in folder.iterdir() if path.name != manifest.NAME}
    manifest.write(folder, entries)


def replace(folder: Path, fqn: str, content: bytes):
    """Replaces what the checkpoint's data file has of a name's end; later entries keep their places."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn.endswith(fqn))
    data = folder / info.relative_path
    info.offset, info.length = data.stat().st_size, len(content)
    data.write_bytes(data.read_bytes() + content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_object(folder: Path, attack: Attack, fqn: str):
    stream = io.BytesIO()
    torch.save([attack], stream)
    replace(folder, fqn, stream.getvalue())


OBJECTS = ["actor.plain/shard_0_1", "actor.optimizer_plain/shard_0_1", "rng/shard_0_1", "common_state/shard_0_1"]


def hostile_metadata(folder: Path, attack: Attack):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = attack
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_tensor(folder: Path, attack: Attack):
    """A tensor's archive whose pickle runs code."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(attack, protocol=2))
        archive.writestr("archive/version", "3\n")
    replace(folder, "word_embeddings.weight", stream.getvalue())


def hostile_log(folder: Path, attack: Attack):
    """A replica's log, whose only record has a pickle for its body."""
    body = pickle.dumps(attack)
    data = response_log.MAGIC + len(body).to_bytes(8, "little") + body + response_log.hash_of(body)
    (folder / waiting_groups.FIRST).unlink()
    (folder / waiting_groups.FIRST).write_bytes(data)


def odd_log(folder: Path, attack: Attack):
    """A replica's log, with groups of fields that no batch has."""
    (folder / waiting_groups.FIRST).unlink()
    record = Record({"groups": []}, {"attack": torch.zeros(1)})
    (folder / waiting_groups.FIRST).write_bytes(waiting_groups.packed(waiting_groups.UNFINISHED, record))


PLACES = {
    ".metadata": (".metadata", hostile_metadata),
    **{f"object {fqn}": ("__0_0.distcp", functools.partial(hostile_object, fqn=fqn)) for fqn in OBJECTS},
    "tensor": ("__0_0.distcp", hostile_tensor),
    "log of the rollout": (waiting_groups.FIRST, hostile_log),
    "fields of a group": (waiting_groups.FIRST, odd_log),
}  # fmt: skip


def resume(rank: int, parsed) -> str:
    """The message with which a run that resumes is rejected."""
    with pytest.raises(UsageError) as caught:
        in_world(rank, "rl", parsed)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_file_runs_no_code_and_is_named(place, run, tmp_path):
    checkpoints = shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    folder, mark = checkpoints / "step_00000001", tmp_path / "mark"
    name, attack = PLACES[place]
    attack(folder, Attack(mark))
    sealed(folder)
    folders.check(folder, "--load")
    again = f"{WAITING} --train-iters 2 --override-opt-param-scheduler --load {folder}"
    (message,) = run_world(resume, 1, program("rl", rl_argv(tmp_path / "again", again), 1))
    assert not mark.exists() and name in message and str(folder) in message and "\n" not in message
