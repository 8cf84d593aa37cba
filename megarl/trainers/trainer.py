"""The base class of all trainers: steps, metrics, files of the run, and resume."""

import abc
import contextlib
import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.arguments import RunConfig
from megarl.checkpoint import commit, earlier_run, host_memory, pretrained, resume
from megarl.checkpoint.writer import CheckpointWriter, layout_of
from megarl.comm.role_mesh import NO_LIMIT, RoleMesh
from megarl.data.order import MixtureOrder, PromptOrder
from megarl.errors import RunStopped, warn
from megarl.faults import run_lock
from megarl.faults.stop import RunStop
from megarl.mcore import device
from megarl.observe import settings_file
from megarl.observe.alarms import Alarms
from megarl.observe.metrics_file import MetricsWriter
from megarl.observe.samples import THUMBNAILS, write_samples
from megarl.observe.terminal import RL_FIELDS, Progress
from megarl.observe.timers import TIMELINE_FILE, Timers, last_events, reduce_times, write_timeline
from megarl.observe.trackers import TrackerOptions, parse_names
from megarl.roles.trainable_model import TrainableModel
from megarl.trainers.events import BestCheckpoint, events_of, is_due
from megarl.trainers.launch import note_end
from megarl.trainers.prompt_inputs import notes_of
from megarl.trainers.setup import step_profiler
from megarl.trainers.step_reports import AsyncMetrics, StepReport


class Trainer(abc.ABC):
    """Counts the steps of a run and writes its files; only rank 0 writes."""

    fields: tuple = RL_FIELDS  # metrics in the progress line of a step

    def __init__(self, config: RunConfig, mesh: RoleMesh, inputs, timers: Timers, best_metric: str):
        """
        Args:
            inputs: of the program; `data` are the `resume.data_fingerprints`, `resume` and `manifest` the checkpoint,
                None and {} without one, `prompt_sets` the sets of prompts by setting, `images` as of `RunImages.of`.
            best_metric: as of `BestCheckpoint`.
        """
        self.config, self.settings = config, config.settings
        self.mesh, self.timers = mesh, timers
        self.inputs, self.images = inputs, inputs.images
        self.events = events_of(config, inputs.manifest.get("step", 0))
        self.checkpoints = CheckpointWriter(self.folder, mesh, self.settings) if self.events.saves else None
        self.memory: CheckpointWriter | None = None  # of the last step, in host memory
        self.step = 0  # the last one that this rank has begun to end
        self.lead = 0  # iterations by which this rank is ahead of the step that it ends
        self.ends_step = True  # whether the running iteration ends a step
        self.skipped = 0
        self._skipped_in_a_row, self._alarms = 0, Alarms(config.settings.alarms)
        self.last_step = config.settings.train_iters
        self.best, self._is_best = BestCheckpoint(best_metric), False  # whether the step's evaluation is it
        self._writer: MetricsWriter | None = None
        self._progress: Progress | None = None
        self._started = time.perf_counter()
        self._times: dict[int, tuple[dict, float]] = {}  # by iteration: of each phase, of all
        self._async_metrics = AsyncMetrics(mesh, NO_LIMIT)
        self._profiler = step_profiler(config, mesh, timers)
        if inputs.resume:
            ignored = resume.adopt_schedules(inputs.manifest, config)
            warn(ignored if mesh.rank == 0 else [])

    @property
    def folder(self) -> Path | None:
        """Folder of the run; None without `--save`."""
        return Path(self.settings.save) if self.settings.save else None

    def open(self, resumed: Path | None, used: list[Path]):
        """Opens the run's files: appends after `self.step` if resumed, otherwise starts new ones. Collective.

        Before rank 0 has moved aside what the folder held, no other rank may write there.

        Args:
            resumed: the checkpoint that the run resumes from.
            used: all checkpoints that it has loaded.
        """
        if self.checkpoints:
            self.checkpoints.used = used
        if self.mesh.rank == 0:
            self._open_files(resumed, used)
        if self.settings.save_memory:
            self._open_memory(resumed)
        if self.mesh.size > 1:
            dist.barrier()

    def _open_memory(self, resumed: Path | None):
        """Prepares the run's folder in host memory. Collective."""
        if self.mesh.rank == 0:
            host_memory.say_source(self.folder, resumed)
        run, nodes = host_memory.open_folder(self.folder, resumed)
        self.memory = CheckpointWriter(run, self.mesh, self.settings, self.checkpoints)
        self.memory.nodes = nodes
        if len(nodes) > 1:
            self.memory.group = dist.new_group(backend="gloo", timeout=NO_LIMIT)

    def _open_files(self, resumed: Path | None, used: list[Path]):
        self._progress = Progress(self.settings.train_iters, fields=self.fields)
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            earlier_run.begin_branch(self.folder, self.step, resumed, used)
            if not self.settings.save_memory:
                host_memory.forget(self.folder)
            settings = settings_file.plain_settings(self._settings())
            s = self.settings
            folder = Path(s.tracker_folder) if s.tracker_folder else None
            names = parse_names(s.trackers)
            trackers = TrackerOptions(names, s.tracker_project, s.tracker_run, folder, s.tracker_offline, settings)
            self._writer = MetricsWriter(self.folder, self.step if resumed else None, trackers)
            if self.images is not None:
                self.images.open()
            settings_file.write_settings(self.folder, settings)

    def _settings(self) -> dict:
        # A rollout that shares the actor's model has the actor's settings.
        roles = {name: role for name, role in self.config.roles.items() if role.model_role == name}
        flags = settings_file.without_repeats({name: vars(role.megatron) for name, role in roles.items()})
        of_roles = {
            name: {
                "ranks": f"{role.ranks.start}-{role.ranks.stop - 1}",
                "max_tokens_per_microbatch": role.max_tokens_per_microbatch,
                "megatron": flags[name],
            }
            for name, role in roles.items()
        }
        found = {
            "megarl": self.config.megarl_settings(),
            "world_size": self.mesh.size,
            "roles": of_roles,
            settings_file.COMMAND_LINE: self.config.command_line,
            settings_file.USER_SETTINGS: self.config.user_settings,
            "environment": settings_file.environment(device.accelerator_name() or settings_file.processor()),
        }
        notes = notes_of(self.inputs.prompt_sets)
        return found | {"data": notes} if notes else found

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining iterations. Iteration i ends step i − `lead`, and counts it in `step`.

        Without a lead iterations are the steps up to `--train-iters`. After a signal they end early, and the last step
        is saved.
        """
        self._started, first, iteration = time.perf_counter(), self.step + 1, self.step
        run_stop = RunStop(self.mesh.rank, self.settings.exit_grace, self.step)
        run_stop.install()
        gc.freeze()  # collecting garbage skips what set-up has made, for all of the run
        is_stopping = False
        while self.step < self.last_step:
            ending = iteration + 1 - self.lead
            self.ends_step = ending > self.step
            if self.ends_step and not run_stop.may_begin(ending):
                is_stopping = True
                if self.mesh.rank == 0 and not self.may_stop(ending - 1):
                    print(
                        f"megarl: step {ending} is trained on all the same: the schedule that the run follows needs"
                        " its weights; the run stops as soon as it needs none of a later step",
                        file=sys.stderr,
                        flush=True,
                    )
            if self.ends_step and is_stopping and self.may_stop(ending - 1):
                self._stop(first)
                return
            run_lock.check()
            iteration = self.timers.step = iteration + 1
            self.step = max(self.step, ending)
            for model in self.trained_models():
                model.begin_step(self.step)
            if self.images is not None:
                self.images.trim()
            with self._profiler.step(iteration) if self._profiler else contextlib.nullcontext():
                yield iteration

    def may_stop(self, step: int) -> bool:
        """Whether the run can end after a step; the same on all ranks."""
        return True

    @abc.abstractmethod
    def trained_models(self) -> list[TrainableModel]:
        """This rank's models that the run trains."""

    @abc.abstractmethod
    def save(self, step: int):
        """Saves a checkpoint if one is due. Collective."""

    def writers(self, is_due: bool) -> list[CheckpointWriter]:
        """What saves the step. `is_due`: by `--save-interval`; after the last step the disk has it."""
        found = [self.checkpoints] if self.checkpoints and (is_due or self._is_best) else []
        return found + [self.memory] * (self.memory is not None and self.step < self.last_step)

    def _stop(self, first: int):
        """Saves the step that a signal made the last one, unless it is saved already. `first`: of this process."""
        if self.folder and self.step >= first and not self.is_due(self.settings.save_interval):
            self.last_step = self.step
            self.save(self.step)
        if self.mesh.rank == 0:
            saved = f"resume with --load {self.folder}" if self.folder else "without --save nothing is saved"
            saved = "--debug-rollout-only saves no checkpoint" if self.folder and not self.checkpoints else saved
            print(f"megarl: stopped by a signal after step {self.step}; {saved}", file=sys.stderr, flush=True)
            if self.folder and self.step < self.settings.train_iters:
                note_end(0, "signal")

    def is_due(self, interval: int) -> bool:
        """Whether an action is due now that runs every `interval` steps (0: never) and after the last one."""
        return is_due(self.step, interval, self.last_step)

    def manifest_entries(self, program: str, vocab_size: int, is_due: bool) -> dict:
        """The run's entries in a checkpoint's manifest, besides the step and the data position.

        `is_due`: it is saved by `--save-interval`, not only as the best so far.
        """
        self.flush()  # skipped steps are counted when a step is written
        return {
            "program": program,
            "seed": self.settings.seed,
            "vocab_size": vocab_size,
            "steps_skipped": self.skipped,
            commit.SKIPPED_IN_A_ROW: self._skipped_in_a_row,
            resume.DATA: self.inputs.data,
            resume.SETTINGS: resume.settings_entry(self.config),
            **resume.manifest_entries(self.config),
            "layout": layout_of(self.config.roles),
            "best": self.best.state_dict(),
            "kept_for": "interval" if is_due else "best",
            **pretrained.manifest_entry(self.config.roles),
            **({} if self.images is None or self.mesh.rank else {resume.IMAGES: self.images.facts()}),
        }

    def restore_progress(self, order: PromptOrder | MixtureOrder | None):
        """Restores step, counters, the best evaluation and the data position, where a rank has one."""
        manifest, notes = self.inputs.manifest, []
        self.step, self.skipped = manifest["step"], manifest["steps_skipped"]
        self._skipped_in_a_row = manifest.get(commit.SKIPPED_IN_A_ROW, 0)
        if manifest.get("best"):
            self.best.load_state_dict(manifest["best"])
        if order is not None and "prompts" not in resume.changed_data(manifest, self.inputs.data):
            order.load_state_dict(manifest["prompt_order"])
        if changed := resume.changed_settings(manifest, resume.settings_entry(self.config)):
            notes.append(f"resumes with other settings: {changed}")
        if self.settings.ema_decay is not None and not resume.holds_average(manifest):
            notes.append("has no moving average (--ema-decay), which begins with the weights of this step")
        if self.settings.predicts and not resume.holds_prediction(manifest):
            notes.append("has no trained layer of multi-token prediction (--mtp-train), which begins anew")
        if libraries := resume.changed_versions(manifest):
            notes.append(f"resumes with other libraries: {libraries}")
        if self.mesh.rank == 0:
            warn(f"--load {self.inputs.resume}: {note}" for note in notes)
        if self.checkpoints:
            self.checkpoints.adopt_frozen(manifest)

    def publish(self, metrics: dict[str, float], samples: Sequence[dict] = ()):
        """Ends a step on this rank and sends its metrics to rank 0; no rank waits for another.

        Args:
            metrics: of this rank. A name that several ranks have must have the same value on all of them; of memory
                metrics the maximum counts.
            samples: this rank's rows of the samples files.
        """
        if (peak := device.peak_bytes()) is not None:
            metrics = metrics | {f"memory/{role}/peak_bytes": peak for role in self.mesh.roles_of(self.mesh.rank)}
        self._end_timers(self.step + self.lead)
        times, seconds = self._times.pop(self.step)
        report = StepReport(metrics=metrics, times=times, seconds=seconds, samples=list(samples))
        self._async_metrics.publish(self.step, report)
        self.flush(wait=self.step == self.last_step)
        for writer in filter(None, (self.checkpoints, self.memory)):
            writer.poll(self.step)

    def _end_timers(self, iteration: int):
        """Keeps the times of an iteration for the report of the step with its number."""
        seconds, self._started = time.perf_counter() - self._started, time.perf_counter()
        self._times[iteration] = self.timers.end_step(iteration), seconds

    def flush(self, wait: bool = True):
        """Writes and prints steps that all ranks have ended, on rank 0; `wait`: all steps that rank 0 has ended."""
        for step, reports in self._async_metrics.poll(wait):
            self._write_step(step, reports)

    def _write_step(self, step: int, reports: Sequence[StepReport]):
        """Merges and writes the metrics of a step. `reports`: of all ranks, in their order."""
        metrics, seconds = [report.metrics for report in reports], reports[0].seconds
        row = {name: value for of_rank in reversed(metrics) for name, value in of_rank.items()}  # the first rank wins
        for name in (name for name in row if name.startswith("memory/")):
            row[name] = max(of_rank.get(name, 0) for of_rank in metrics)
        is_skipped = any(value for name, value in row.items() if name.endswith("/updates_skipped"))
        self.skipped += is_skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        roles_of_ranks = [self.mesh.roles_of(rank) for rank in range(self.mesh.size)]
        times = reduce_times([report.times for report in reports], roles_of_ranks)
        row |= times | {"steps_skipped": self.skipped}
        if "perf/tokens" in row:
            row["perf/tokens_per_s"] = row["perf/tokens"] / seconds
        if "rollout/tokens" in row:
            rollout_seconds = times.get(f"time/{self.mesh['rollout'].model_role}/rollout_s")
            if rollout_seconds is not None:  # None: saved responses, which no engine has generated
                row["rollout/tokens_per_s"] = row["rollout/tokens"] / max(rollout_seconds, 1e-9)
        rows = sorted((row for report in reports for row in report.samples), key=lambda row: row["sequence"])
        if rows and self.folder:
            write_samples(self.folder, step, rows)
            if self.images is not None:
                self.images.write_thumbnails(self.folder / THUMBNAILS, rows)
        self.write(step, row)
        self._progress.line(step, row, seconds)
        self._alarms.watch(step, row)
        if self._skipped_in_a_row >= (self.settings.max_skipped_steps or math.inf):
            raise RunStopped(
                f"--max-skipped-steps {self.settings.max_skipped_steps}: in each of the last {self._skipped_in_a_row} "
                f"steps, up to step {step}, an update was skipped: a loss or gradient was not finite, or over a limit"
                + "".join(f"; {name} {row[name]:g}" for name in row if name.endswith("/loss_scale"))
            )

    def write(self, step: int, row: dict[str, float]):
        """Appends a step's line to the metrics file; rank 0 only."""
        if self._writer:
            self._writer.write(step, row)

    def close(self):
        """Writes the remaining steps, the timeline and the report; waits for the last checkpoint. Collective."""
        for writer in filter(None, (self.checkpoints, self.memory)):
            writer.wait()
        if self.memory is not None:
            if self.mesh.rank == 0:
                host_memory.forget(self.folder)
            host_memory.remove(self.memory.run, self.memory.nodes)
        self.flush()
        events = self.mesh.gather(last_events(self.timers.events(), self.mesh.size))
        if events is None or self._writer is None:
            return
        self._writer.close()
        write_timeline(self.folder / TIMELINE_FILE, events)
        from megarl.extras.report import write_report

        write_report(self.folder)
        run_lock.release()
