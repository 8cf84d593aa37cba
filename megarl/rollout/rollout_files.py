"""Rollouts on disk (`--save-rollouts`, `--load-rollouts`): the responses of each step, as logs that have ended.

`DIR/rollouts/step_%08d/` holds what was generated for a step, in a log `replica_00000.log` of each replica. Its records
are, of each round, the fields of `Batch` that generation has filled, with `--greedy-baseline` those of the greedy
responses, and with environments what these have answered to each episode (`episodes/results.py`). `manifest.json`,
written last, has the lines of the prompts, which groups were kept, and size and SHA-256 of every file.
"""

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.batch import FIELDS, Batch, concatenate
from megarl.checkpoint import manifest as manifests
from megarl.checkpoint.resume import is_held_out
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError, one_line
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.measurements import is_metric
from megarl.observe.files import step_name, step_of, sync_directory
from megarl.observe.terminal import ranges_text
from megarl.plain_files import reading
from megarl.plain_values import Each, fits
from megarl.rollout import response_log
from megarl.rollout.group_buffer import gather_layers, own_share
from megarl.rollout.response_log import SUFFIX, Records
from megarl.rollout.round_scores import GenerationRound

FOLDER, WRITING = "rollouts", ".writing-"
RESPONSES, GREEDY, EPISODE = "responses", "greedy", "episode"  # kinds of records


class RolloutRecord(NamedTuple):
    """What a manifest says about the responses generated for a step."""

    folder: Path
    rounds: list[dict]  # {"lines": of the prompts, "kept": bool of each group, "draws": …}
    waiting: int  # groups that waited from earlier steps when the first round began
    order: dict  # state of `PromptOrder` after the last round
    tokens: int  # generated in all rounds
    metrics: dict[str, float]  # that only the engine and the buffer of partial rollouts know
    layers: list[int] | None  # MoE layers of the routes, in the order of the records


class RolloutWriter:
    """Writes the rollout of each step, on all ranks of the rollout together; others return at once."""

    def __init__(self, run: Path, role_groups: RoleGroups, layers: tuple[int, ...] | None, facts: dict):
        """Removes what a killed run left, on rank 0; the trainer's `open` comes between this and the first step.

        `layers`: numbers of the MoE layers whose routes this rank records; None: the run records none. `facts`: entries
        of every manifest about the run, which `SavedRollouts` compares.
        """
        self.folder, self.role_groups = run / FOLDER, role_groups
        self.layers, self.facts = layers, facts
        if dist.get_rank() == 0:
            for unfinished in self.folder.glob(f"{WRITING}*"):
                shutil.rmtree(unfinished)

    def begin(self, step: int, waiting: int, version: int):
        """Begins the rollout of a step, for which `waiting` groups of earlier steps are there. `version`: of the policy
        with which it begins."""
        self._step, self._waiting, self._version = step, waiting, version
        self._rounds: list[dict] = []
        self._path = self.folder / f"{WRITING}{step_name(step)}" / f"replica_{self.role_groups.dp_rank:05d}{SUFFIX}"
        self._layers: list[int] | None = None
        self._longest = 0  # tokens of a sequence of this replica

    def add(self, found: GenerationRound, groups: PromptGroups, kept: torch.Tensor):
        """Writes a round: this replica's share of it. `kept` [G] bool: groups that the filter keeps."""
        for kind, batch, held in ((RESPONSES, found.batch, self.layers), (GREEDY, found.greedy, None)):
            gathered = None if batch is None else gather_layers(batch, held, self.role_groups)
            if gathered is None:
                continue
            whole, layers = gathered
            self._layers = layers or self._layers
            self._longest = max([self._longest, *whole.lengths.tolist()])
            self._append({"kind": kind}, {name: getattr(whole, name) for name in whole.present()})
        for sequence, record in sorted((found.records or {}).items()) if self.role_groups.is_leader else ():
            self._append({"kind": EPISODE, "sequence": sequence, **record}, {})
        sizes = groups.sizes.tolist()
        self._rounds.append({"lines": found.lines, "kept": kept.tolist(), "draws": found.draws, "sizes": sizes})

    def _append(self, facts: dict, fields: dict[str, torch.Tensor]):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            response_log.append(file.fileno(), response_log.packed({"round": len(self._rounds), **facts}, fields))

    def commit(self, order: dict, tokens: float, metrics: dict[str, float]):
        """Gives the step's rollout its name, once all replicas have written it. Arguments as of `RolloutRecord`."""
        role_groups = self.role_groups
        if not role_groups.is_leader:
            return
        files = {self._path.name: manifests.seal(self._path)} if self._path.exists() else {}
        written = role_groups.gather_replicas((files, self._longest))
        if role_groups.dp_rank:
            return
        writing, target = self._path.parent, self.folder / step_name(self._step)
        manifests.write(writing, {
            "program": "train_rl", "step": self._step, "world_size": dist.get_world_size(), **self.facts,
            "replicas": len(role_groups.replicas), "layers": self._layers, "waiting": self._waiting, "order": order,
            "version": self._version, "tokens": tokens, "metrics": metrics, "rounds": self._rounds,
            "longest": max(longest for _, longest in written),
            "files": {name: seal for files, _ in written for name, seal in files.items()},
        })  # fmt: skip
        if target.exists():  # of the same step before the run was started again
            replaced = self.folder / f"{WRITING}replaced-{target.name}"
            target.rename(replaced)
            shutil.rmtree(replaced)
        writing.rename(target)
        sync_directory(self.folder)


def saved_records(folder: Path, flag: str) -> Records:
    """The records of a step's folder by round and kind."""
    return Records(folder.glob(f"replica_*{SUFFIX}"), flag, "round", "kind")


class SavedRollouts:
    """The rollouts in a folder, checked against the flags of the run that trains on them."""

    def __init__(self, path: str, steps: range, facts: dict, longest: int):
        """`path`: value of `--load-rollouts`, a run's folder or its folder `rollouts`; `steps`: that the run takes;
        `facts`: of the run, as for `RolloutWriter`; `longest`: tokens that a sequence of the run may have.

        UsageError for missing, incomplete or damaged rollouts, or rollouts of other prompts or settings.
        """
        self.path, self._facts = path, facts
        self._longest, folder = longest, Path(path)
        self._records: tuple[Path, Records] | None = None  # of the step that was read last
        self._folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        there = {step_of(found.parent) for found in self._folder.glob(f"step_*/{manifests.NAME}")}
        if not there:
            raise self._error("holds no rollouts; allowed is the folder of a run with --save-rollouts")
        missing = [step for step in steps if step not in there]
        if missing:
            raise self._error(
                f"has no step {missing[0]}, but steps {ranges_text(there)}; the run takes {ranges_text(steps)}, those"
                " after the checkpoint of --load up to --train-iters"
            )
        self.records = {step: self._record(step) for step in steps}

    @property
    def folders(self) -> list[Path]:
        """Folder of each step that the run takes."""
        return [record.folder for record in self.records.values()]

    def _error(self, problem: str, step: int | None = None) -> UsageError:
        where = self.path if step is None else self._folder / step_name(step)
        return UsageError(one_line(f"--load-rollouts {where}: {problem}"))

    def _record(self, step: int) -> RolloutRecord:
        folder = self._folder / step_name(step)
        with reading(f"--load-rollouts {folder}: {manifests.NAME}", "is damaged"):
            manifest = manifests.read(folder, "--load-rollouts")
            if not {"rounds", *self._facts} <= manifest.keys() or manifest["step"] != step:
                raise self._error("is no rollout of this step", step)
            problem = manifests.check_sizes(folder, manifest) or _misfit(manifest, self._facts, self._longest)
            if problem:
                raise self._error(problem, step)
            if not fits(manifest["metrics"], Each((int, float), is_metric)):
                raise self._error("has metrics that megarl does not write", step)
            return RolloutRecord(folder=folder, **{name: manifest[name] for name in RolloutRecord._fields[1:]})

    def read(self, record: RolloutRecord, number: int, kind: str, fields: Iterable[str],
             layers: tuple[int, ...] | None, role_groups: RoleGroups, groups: PromptGroups,
             optional: Collection[str] = ()) -> Batch:  # fmt: skip
        """This replica's share of a round: whole groups, round-robin.

        Args:
            kind: `RESPONSES` or `GREEDY`.
            fields: names of those to read.
            layers: numbers of the MoE layers whose routes are read, in this order; None: no routes.
            groups: of the round; of greedy responses, one for each prompt.
            optional: further fields, which are read where the files have them.

        Raises:
            RuntimeError: a file is not what `RolloutWriter` writes.
        """
        names, batches = [*fields, *(["routes"] if layers is not None else [])], []
        if self._records is None or self._records[0] != record.folder:
            self._records = record.folder, saved_records(record.folder, "--load-rollouts")
        for entry in self._records[1].entries(number, kind):
            loaded = entry.read().fields
            names += [field for field in optional if field in loaded and field not in names]
            if not set(names) <= loaded.keys() or any(loaded[n].dtype != FIELDS[n]["dtype"] for n in names):
                raise RuntimeError(f"--load-rollouts {entry.path}: lacks some of {', '.join(names)}")
            batches.append(Batch(**{field: loaded[field] for field in names}))
        batch = concatenate(batches)
        self._check(batch, record, groups.count)
        if layers is not None:
            batch.routes = batch.routes[:, [record.layers.index(layer) for layer in layers]]
        return own_share(batch, groups, role_groups).to(device.device())

    def _check(self, batch: Batch, record: RolloutRecord, count: int):
        is_whole = torch.equal(batch.sequence_ids, torch.arange(count))
        is_known = batch.tokens < self._facts["vocab_size"]
        if not self._facts.get("reads_images"):  # whose rows are negative
            is_known &= batch.tokens >= 0
        if not is_whole or not is_known.all() or int(batch.lengths.sum()) != len(batch.tokens):
            raise RuntimeError(
                f"--load-rollouts {record.folder}: a round does not hold {count} sequences of known tokens"
            )


def _misfit(manifest: dict, facts: dict, longest: int) -> str | None:
    """Why a run cannot train on a rollout; None if it can."""
    for name in ("prompts_per_step", "samples_per_prompt"):
        if manifest[name] != facts[name]:
            return f"was written with --{name.replace('_', '-')} {manifest[name]}; this run has {facts[name]}"
    if manifest["vocab_size"] != facts["vocab_size"]:
        return f"has tokens of a vocabulary of {manifest['vocab_size']}; this run's has {facts['vocab_size']}"
    for name, entry in facts["data"].items():
        stored = manifest["data"].get(name, entry)
        if not is_held_out(name) and stored["sha256"] != entry["sha256"]:
            flag = "--" + name.replace("_", "-")
            return f"was written with another {flag} ({stored['value']}) than {entry['value']}"
    if manifest["longest"] > longest:
        return (
            f"has sequences of {manifest['longest']} tokens; --max-prompt-length + --max-response-length is {longest}"
        )
    for name in ("greedy_baseline", "partial_rollouts"):
        if facts[name] and not manifest[name]:
            return f"was written without --{name.replace('_', '-')}"
    if (facts["environment"] is None) != (manifest["environment"] is None):
        return f"was written {'with' if facts['environment'] is None else 'without'} --environment"
    if facts["routes"] is not None and manifest["routes"] != facts["routes"]:
        return f"has routes of {manifest['routes'] or 'no layers'}; --router-replay rollout needs {facts['routes']}"
    return None
