"""Writes a run's checkpoints: every rank its own files, then rank 0 the manifest, the name and the pointers.

With `--async-save` a rank copies its state to host memory and trains on while a thread writes the copy. The thread
takes part in no collective: `poll`, after each step, completes a checkpoint that all ranks have written.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.arguments import Settings
from megarl.checkpoint import commit, folders, host_memory
from megarl.checkpoint import manifest as manifests
from megarl.comm.role_mesh import RoleMesh
from megarl.errors import warn
from megarl.mcore.config import megatron_flags
from megarl.mcore.weights import dist_checkpoint
from megarl.mcore.weights.checkpoint_files import PlannedSave, plan_save
from megarl.observe.files import write_atomically

KEY = "megarl/checkpoint"  # prefix of entries in the process group's store
_COMPLETE, _WAIT = "complete", "wait"


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are intact."""


class _Pending:
    """A checkpoint that this rank writes, at once or in a thread.

    Without a collective, in which ranks would meet that otherwise work at different steps, they agree on the step in
    which all complete what threads write: the first rank that ends a step writes to the process group's store whether
    all had written their files by then, and the others read it when they end the same step.
    """

    def __init__(self, step: int, folder: Path, planned: PlannedSave, entries: dict, files: dict[str, bytes]):
        self.step, self.folder, self.planned, self.entries, self.files = step, folder, planned, entries, files
        self._future: Future[tuple] | None = None

    def start(self, state: dict, key: str):
        """Copies the state that was planned, and begins to write the copy in a thread. `key`: of the writer."""
        self._store, self._is_counted, self._key = dist.distributed_c10d._get_default_store(), False, key
        self._entries = [f"{key}/written/{self.step}"]  # in the store; the first counts the ranks that have written
        self.planned.snapshot(state)
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._future = thread.submit(self._write)
        thread.shutdown(wait=False)

    def completes(self, step: int) -> bool:
        """Whether the ranks complete it at the end of a step. Every rank asks after every step, in order."""
        written = self._entries[0]
        if self._future.done() and not self._is_counted:
            self._store.add(written, 1)
            self._is_counted = True
        self._entries.append(f"{self._key}/{step}")
        answer = _COMPLETE if self._store.add(written, 0) == dist.get_world_size() else _WAIT
        return self._store.compare_set(self._entries[-1], "", answer).decode() == _COMPLETE

    def close(self):
        """Deletes the entries, on rank 0, when all ranks have completed the checkpoint and so have asked for the last
        time."""
        for entry in self._entries if dist.get_rank() == 0 else ():
            self._store.delete_key(entry)

    def write(self) -> tuple:
        """(write results, {file: `manifest.seal`}, error) of this rank's files; the error is None or a line."""
        return self._write() if self._future is None else self._future.result()

    def _write(self) -> tuple:
        try:
            results, sealed = self.planned.write()
            for name, data in self.files.items():
                write_atomically(self.folder / name, data)
                sealed[name] = manifests.seal(self.folder / name)
        except Exception as error:
            return [], {}, _line(error)
        return results, sealed, None


class CheckpointWriter:
    """Saves checkpoints to a run's folder on the disk, or the last one to its folder in host memory."""

    def __init__(self, run: Path, mesh: RoleMesh, settings: Settings, disk: "CheckpointWriter | None" = None):
        """`disk`: of a writer to host memory, which writes the weights that many checkpoints share."""
        self.run, self.mesh, self.settings, self.disk = run, mesh, settings, disk
        self.nodes = [[*range(mesh.size)]]  # ranks that see the same folder
        self.group: Any = None  # of all ranks, for tensors in host memory, if nodes are several
        self._key = f"{KEY}/{'disk' if disk is None else 'memory'}"
        self.used: list[Path] = []  # checkpoints whose weights the run has loaded: never removed
        self._frozen: dict[str, str] = {}  # role -> its folder in `checkpoints/frozen`
        self._pending: _Pending | None = None
        self._sweeper: threading.Thread | None = None  # removes older checkpoints, on rank 0

    def save(
        self,
        step: int,
        roles: dict,
        manifest: dict,
        files: dict[str, bytes] | None = None,
        frozen: dict[str, Callable[[], dict]] | None = None,
    ):
        """Writes `DIR/checkpoints/step_%08d`, in the background with `--async-save`; a collective of the world.

        Args:
            roles: role -> its state on this rank (`TrainableModel.state`), for the roles of this rank.
            manifest: entries of the manifest. `best` (`BestCheckpoint.state_dict`) defines the step that
                `DIR/checkpoints/best` names; `kept_for` "best" lets the next best checkpoint remove this one.
            files: further files of this rank by name, which no other rank has.
            frozen: roles whose weights seldom change -> their state on this rank. It is written once, and again after
                `forget_frozen`.

        Raises:
            SaveError: on all ranks, with `--on-save-failure stop`, if this one or the one before could not be written.
        """
        self._complete()
        self._handled(lambda: self._save(step, roles, manifest, files or {}, frozen or {}))

    def poll(self, step: int):
        """Completes an asynchronous save in the first step at whose end all ranks have written it. Every rank calls
        this after every step."""
        pending = self._pending
        if pending is not None and pending.completes(step):
            self._complete()

    def wait(self):
        """Waits for an asynchronous save and completes it. Collective."""
        self._complete()
        if self._sweeper is not None:
            self._sweeper.join()

    def _complete(self):
        pending, self._pending = self._pending, None
        if pending is not None:
            self._handled(lambda: self._commit(pending))
            pending.close()

    def _handled(self, save: Callable[[], None]):
        """Runs a save; if it fails, the run stops or continues by `--on-save-failure`, on all ranks alike."""
        try:
            save()
        except SaveError as error:
            if self.settings.on_save_failure == "stop":
                raise
            if self.mesh.rank == 0:
                warn([f"{error}; the run goes on (--on-save-failure continue)"])

    def _save(self, step: int, roles: dict, manifest: dict, files: dict[str, bytes], frozen: dict[str, Callable]):
        if frozen:
            manifest = {**manifest, folders.FROZEN: self.frozen_digests(step, frozen)}
        name = folders.step_folder(self.run, step).name
        self._agree(step, lambda: commit.make_room(self.run, name), self._first)
        folder, state = commit.writing_folder(self.run, name), {**roles, **dist_checkpoint.rank_state()}
        entries = {"world_size": self.mesh.size, "versions": manifests.versions(), **manifest}
        pending = _Pending(step, folder, plan_save(state, folder), entries, files)
        if self.settings.async_save:
            pending.start(state, self._key)
            self._pending = pending
        else:
            self._commit(pending)

    def frozen_digests(self, step: int, frozen: dict[str, Callable]) -> dict[str, str]:
        """{role: its folder in `checkpoints/frozen`}, where weights are written that are not there yet. Collective."""
        if self.disk is not None:
            return self.disk.frozen_digests(step, frozen)
        for role in [role for role in frozen if role not in self._frozen]:
            self._complete()  # its folder would be taken for one that a killed run left
            self._frozen[role] = self._save_frozen(step, role, frozen[role]())
        return {role: self._frozen[role] for role in frozen}

    def adopt_frozen(self, manifest: dict):
        """Frozen weights that the run's folder holds since an earlier start are not written again.

        `manifest`: of the checkpoint that the run has resumed from.
        """
        for role, digest in manifest.get(folders.FROZEN, {}).items():
            if (self.run / "checkpoints" / folders.FROZEN / digest / manifests.NAME).is_file():
                self._frozen[role] = digest

    def forget_frozen(self, role: str):
        """The next checkpoint writes a role's frozen weights anew, because they have changed."""
        self._frozen.pop(role, None)

    def _save_frozen(self, step: int, role: str, state: dict) -> str:
        """Writes a role's weights to `checkpoints/frozen/<digest of its files>` and returns the digest. Collective."""
        self._agree(step, lambda: commit.make_room(self.run, folders.FROZEN))
        folder = commit.writing_folder(self.run, folders.FROZEN)
        pending = _Pending(step, folder, plan_save(state, folder), {}, {})
        gathered = self.mesh.gather(pending.write())
        entries = {"step": 0, "world_size": self.mesh.size, "program": folders.FROZEN, "role": role}
        return self._agree(step, lambda: commit.commit_frozen(self.run, entries, self._seal(pending, gathered)))

    def _commit(self, pending: _Pending):
        """Completes a checkpoint when all ranks have written their files. Collective."""
        gathered = self.mesh.gather(pending.write())
        if self.disk is None:
            self._agree(pending.step, lambda: self._finish(pending, self._seal(pending, gathered)))
        else:
            self._commit_to_memory(pending, gathered)

    def _commit_to_memory(self, pending: _Pending, gathered: list[tuple]):
        """Completes a checkpoint on each node, then removes the one before: all nodes have one of them at any time."""

        def seal() -> tuple:
            files, of_ranks = self._seal(pending, gathered), [of_rank for _, of_rank, _ in gathered]
            more = files.keys() - {name for of_rank in of_ranks for name in of_rank}
            more_files = {name: (pending.folder / name).read_bytes() for name in sorted(more)}
            return pending.entries, files, of_ranks, more_files  # the first rank's entries: others have fewer

        step = pending.step
        entries, files, of_ranks, more = self._agree(step, seal)
        if self.group is not None:
            spread = functools.partial(host_memory.pass_on, pending.folder, self.nodes, of_ranks, more, self.group)
            self._agree(step, spread, range(self.mesh.size))
        self._agree(step, lambda: commit.commit_alone(self.run, step, entries, files), self._first)
        self._agree(step, lambda: commit.keep_alone(self.run, step), self._first)

    @property
    def _first(self) -> Sequence[int]:
        """The first rank of each node."""
        return [node[0] for node in self.nodes]

    def _finish(self, pending: _Pending, files: dict[str, dict]):
        """Gives a checkpoint of these sealed files its name, on rank 0, and removes older ones."""
        commit.commit(self.run, pending.step, pending.entries, files)
        keep_last = self.settings.keep_last
        try:
            commit.prune(self.run, keep_last, self.settings.keep_every, self.used)
        except OSError as error:
            warn([f"--keep-last {keep_last}: an older checkpoint cannot be removed ({error})"])
        if self.settings.async_save:  # to remove large files takes as long as a copy of the state
            if self._sweeper is not None:
                self._sweeper.join()
            self._sweeper = threading.Thread(target=commit.sweep, args=(self.run,), name="sweep")
            self._sweeper.start()
        else:
            commit.sweep(self.run)

    def _seal(self, pending: _Pending, gathered: list[tuple]) -> dict[str, dict]:
        """Writes what rank 0 adds to the files of all ranks; `manifest.seal` of every file by name."""
        for rank, (_, _, error) in enumerate(gathered):
            if error:
                raise SaveError(f"rank {rank}: {error}")
        pending.planned.finish([results for results, _, _ in gathered])
        sealed = {name: entry for _, of_rank, _ in gathered for name, entry in of_rank.items()}
        return sealed | {
            path.name: manifests.seal(path) for path in pending.folder.iterdir() if path.name not in sealed
        }

    def _agree(self, step: int, action: Callable[[], Any], ranks: Sequence[int] = (0,)) -> Any:
        """Runs an action on some ranks; all ranks return the result of the first. If one fails, all raise `SaveError`.
        Collective."""
        outcome: list[Any] = [None, None]  # result, failure
        if self.mesh.rank in ranks:
            try:
                outcome[0] = action()
            except (OSError, SaveError) as error:
                outcome[1] = str(error) if isinstance(error, SaveError) else _line(error)
        if len(ranks) == 1:
            dist.broadcast_object_list(outcome, src=ranks[0])
        else:
            outcomes: list[Any] = [None] * self.mesh.size
            dist.all_gather_object(outcomes, outcome)
            outcome = [outcomes[ranks[0]][0], next((failed for _, failed in outcomes if failed), None)]
        result, failure = outcome
        if failure:
            if self.mesh.rank in self._first:
                commit.discard(self.run, ignore_errors=True)  # frees the space of what could not be written
            raise SaveError(f"the checkpoint of step {step} could not be written: {failure}")
        return result


def layout_of(roles: dict) -> dict[str, dict]:
    """The manifest's entry about ranks and parallel sizes ({name: `RoleSettings`})."""
    return {
        name: {"ranks": f"{role.ranks.start}-{role.ranks.stop - 1}"}
        | dataclasses.asdict(megatron_flags.parallel_sizes(role.megatron))
        for name, role in roles.items()
    }


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
