"""Weights & Biases. Login, entity and server are the package's own: `wandb login`, WANDB_ENTITY, WANDB_BASE_URL."""

import contextlib
from typing import Any

import wandb

from megarl.observe.trackers import TrackedRun

OPEN_SECONDS, CLOSE_SECONDS = 30.0, 30.0  # that the server has to answer, and to take the rest at the end


class WandbTracker:
    """A run of Weights & Biases with this run's id. Rows go to the package's own process, which sends and retries.

    A run that continues after an earlier step than it had reached is rewound to that step (`resume_from`), which the
    server must allow; otherwise steps that it has already are ignored until the run is past them.
    """

    def __init__(self, run: TrackedRun):
        options = run.options
        if not options.offline and not wandb.login(prompt=False):  # `init` would ask at the terminal
            raise wandb.Error("no API key; run `wandb login`")
        # What the package would do beside metrics is off. `stop_fn`: the page's stop button would interrupt the rank.
        off: dict[str, Any] = dict(console="off", silent=True, save_code=False, disable_git=True, disable_code=True)
        limits = dict(init_timeout=OPEN_SECONDS, finish_timeout=CLOSE_SECONDS, finish_timeout_raises=True)
        settings = wandb.Settings(**off, **limits, x_disable_stats=True, stop_fn=lambda: None)
        arguments: dict[str, Any] = dict(project=options.project, name=options.run, dir=options.folder)
        arguments |= dict(config=options.config, settings=settings, mode="offline" if options.offline else None)
        if run.rewinds:
            with contextlib.suppress(wandb.Error):
                self._run = wandb.init(**arguments, resume_from=f"{run.id}?_step={run.resume_step}")
                return
        self._run = wandb.init(**arguments, id=run.id, resume=None if run.resume_step is None else "allow")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One row of the run's history."""
        self._run.log(scalars, step=step, commit=True)

    def close(self) -> None:
        """Sends the rest, and ends the package's process."""
        try:
            self._run.finish()
        finally:
            wandb.teardown()  # the handler at exit prints errors if a signal to the whole job has ended the process
