"""What the programs share around their loops: start, refusal of wrong input, files of the run, steps, the end."""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from megarl import arguments
from megarl.checkpoint import folders
from megarl.comm import role_mesh
from megarl.data.conversations import Encoder, build_encoder
from megarl.data.order import PromptOrder
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import WARNED, UsageError, warn
from megarl.mcore import device
from megarl.observe.metrics_file import MetricsWriter
from megarl.observe.progress import RL_FIELDS, Progress
from megarl.observe.report import write_report
from megarl.observe.samples import SamplesWriter
from megarl.observe.settings_file import write_settings
from megarl.observe.timeline import write_timeline
from megarl.observe.timers import Timers, reduce_times
from megarl.trainers.async_metrics import AsyncMetrics


def launch(train, program: str):
    """Runs `train(program_arguments)` as a program: one line and exit status 2 for wrong input, before any work.

    Another exception on any rank ends the process with a line that names rank, role, phase and step; the launcher
    then ends the other ranks.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    timers = Timers()
    try:
        parsed = arguments.parse(sys.argv[1:], size, program)
        if rank == 0 and not os.environ.get(WARNED):
            warn(parsed.warnings)
        train(parsed, timers)
    except UsageError as error:
        if rank == error.speaker:
            print(f"megarl: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except Exception as error:
        role, phase = timers.current() or ("program", "set-up")
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        where = f"{role}/{phase} of step {timers.step}"
        print(f"megarl: rank {rank} failed in {where}: {reason}", file=sys.stderr, flush=True)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for collectives that the other ranks never join
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def check_common(program: arguments.RunConfig):
    """What every training program checks of its flags beyond their single values. Raises UsageError."""
    s = program.settings
    check_required({"--prompts": s.prompts})
    arguments.check_microbatches(program)
    if s.eval_interval and not s.eval_prompts:
        raise UsageError(f"--eval-interval {s.eval_interval}: needs --eval-prompts")
    if s.save_interval and not s.save:
        raise UsageError(f"--save-interval {s.save_interval}: needs --save")
    check_save(s)


def build_role_encoder(role: arguments.RoleSettings, settings: arguments.Settings) -> Encoder:
    """A role's tokenizer with its chat template; errors name the role's own flags where it has such."""
    own = (role.tokenizer_type, role.tokenizer_model) != (settings.tokenizer_type, settings.tokenizer_model)
    tokenizer = build_tokenizer(role.tokenizer_type, role.tokenizer_model, f"{role.name}-" if own else "")
    prefix = "" if role.chat_template == settings.chat_template else f"{role.name}-"
    return build_encoder(tokenizer, None if role.chat_template == "none" else role.chat_template, prefix)


def check_required(flags: dict[str, object]):
    """UsageError for the first of these flags that has no value."""
    for flag, value in flags.items():
        if not value:
            raise UsageError(f"{flag} is missing: it has no default")


def check_save(settings: arguments.Settings):
    """UsageError unless `--save`, where it is given, can be made or written to."""
    if settings.save:
        path = Path(settings.save).absolute()
        there = next(p for p in (path, *path.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"--save {settings.save}: {there} is not a folder that can be written to")


def make_deterministic():
    """Kernels that give the same bits each time, or an error where there is none."""
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def create_role_mesh(program: arguments.RunConfig) -> role_mesh.RoleMesh:
    """The world and all roles' groups; the time-out is `--distributed-timeout-minutes`."""
    if program.settings.deterministic:
        make_deterministic()
    minutes = next(iter(program.roles.values())).megatron.distributed_timeout_minutes
    return role_mesh.create_mesh(program.roles, timedelta(minutes=minutes))


class Trainer:
    """The steps of a run and the files it leaves; everything is written by rank 0 alone."""

    def __init__(self, program: arguments.RunConfig, ranks: role_mesh.RoleMesh, timers: Timers, fields=RL_FIELDS):
        self.program, self.settings, self.mesh, self.timers = program, program.settings, ranks, timers
        self.step = 0
        self.skipped = 0
        self.last_step = program.settings.train_iters
        self._fields = fields
        self._writer = self._progress = None
        self._started = time.perf_counter()
        minutes = next(iter(program.roles.values())).megatron.distributed_timeout_minutes
        self._ledger = AsyncMetrics(ranks, timedelta(minutes=minutes))

    @property
    def folder(self) -> Path | None:
        """Folder of the run, None when nothing is to be kept."""
        return Path(self.settings.save) if self.settings.save else None

    def open(self, resumed: bool):
        """Opens the run's files: behind `self.step` when resumed, afresh otherwise."""
        if self.mesh.rank:
            return
        self._progress = Progress(self.settings.train_iters, fields=self._fields)
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = MetricsWriter(self.folder, resume_step=self.step if resumed else None)
            write_settings(self.folder, self._settings())

    def _settings(self) -> dict:
        roles = {
            name: {
                "ranks": f"{role.ranks.start}-{role.ranks.stop - 1}",
                "max_tokens_per_microbatch": role.max_tokens_per_microbatch,
                "megatron": vars(role.megatron),
            }
            for name, role in self.program.roles.items()
            if role.model_role == name  # a rollout on the actor's own module has no settings of its own
        }
        return {"megarl": self.program.own_settings(), "world_size": self.mesh.size, "roles": roles}

    def steps(self) -> Iterator[int]:
        """Numbers of the steps that are left: 1 … `--train-iters`."""
        self._started = time.perf_counter()
        while self.step < self.last_step:
            self.step = self.timers.step = self.step + 1
            yield self.step

    def is_due(self, interval: int) -> bool:
        """Whether something done every `interval` steps (0: never) and behind the last one is due now."""
        return self.step == self.last_step or bool(interval and self.step % interval == 0)

    def manifest_entries(self, program: str, vocab_size: int, order: PromptOrder) -> dict:
        """What the manifest of a checkpoint tells of the run besides its step; `resume_from` reads it back."""
        self.flush()  # steps that were skipped are counted where they are written
        return {
            "program": program,
            "seed": self.settings.seed,
            "vocab_size": vocab_size,
            "prompt_order": order.state_dict(),
            "steps_skipped": self.skipped,
        }

    def resume_from(self, folder: Path, order: PromptOrder) -> dict:
        """Goes on behind a checkpoint: step, data position and what was counted; returns the whole manifest."""
        manifest = folders.read_manifest(folder, "--load")
        self.step, self.skipped = manifest["step"], manifest["steps_skipped"]
        order.load_state_dict(manifest["prompt_order"])
        return manifest

    def record(self, metrics: dict[str, float], samples: list[dict] = ()):
        """Ends a step on this rank, and tells of it; no rank waits for another.

        `metrics` are this rank's; where several ranks give the same name they give the same number, except for
        memory, of which the largest counts. `samples`: rows of the samples file of which this rank speaks.
        """
        if (peak := device.peak_bytes()) is not None:
            metrics = metrics | {f"memory/{role}/peak_bytes": peak for role in self.mesh.roles_of(self.mesh.rank)}
        seconds, self._started = time.perf_counter() - self._started, time.perf_counter()
        self._ledger.publish(self.step, (metrics, self.timers.end_step(self.step), seconds, samples))
        self.flush(wait=self.step == self.last_step)

    def flush(self, wait: bool = True):
        """Writes and prints steps that all ranks have ended, on rank 0; all that it has ended itself when it waits."""
        for step, told in self._ledger.poll(wait):
            self._write_step(step, *zip(*told, strict=True))

    def _write_step(self, step: int, metrics: tuple, times: tuple, seconds: tuple, samples: tuple):
        """Each argument is of all ranks, in their order."""
        row = {name: value for part in reversed(metrics) for name, value in part.items()}
        for name in (name for name in row if name.startswith("memory/")):
            row[name] = max(part.get(name, 0) for part in metrics)
        self.skipped += any(value for name, value in row.items() if name.endswith("/updates_skipped"))
        roles_of_ranks = [self.mesh.roles_of(rank) for rank in range(self.mesh.size)]
        times = reduce_times(times, roles_of_ranks)
        row |= times | {"steps_skipped": self.skipped}
        if "perf/tokens" in row:
            row["perf/tokens_per_s"] = row["perf/tokens"] / seconds[0]
        if "rollout/tokens" in row:
            seconds_writing = times[f"time/{self.mesh['rollout'].model_role}/rollout_s"]
            row["rollout/tokens_per_s"] = row["rollout/tokens"] / max(seconds_writing, 1e-9)
        rows = sorted((row for part in samples for row in part), key=lambda row: row["sequence"])
        if rows and self.folder:
            SamplesWriter(self.folder).write(step, rows)
        self.write(step, row)
        self._progress.line(step, row, seconds[0])

    def write(self, step: int, row: dict[str, float]):
        """Appends a line of metrics for a step; rank 0 only."""
        if self._writer:
            self._writer.write(step, row)

    def close(self):
        """Writes what is left of the steps, the time line and the report. Collective."""
        self.flush()
        events = self.mesh.gather(self.timers.events())
        if events is None or self._writer is None:
            return
        self._writer.close()
        write_timeline(self.folder / "timeline.json", events)
        write_report(self.folder)
