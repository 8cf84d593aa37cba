"""Weights & Biases. Login, entity and server are the package's own: `wandb login`, WANDB_ENTITY, WANDB_BASE_URL."""

from typing import Any

import wandb

from megarl.observe.trackers.base import TrackedRun


class WandbTracker:
    """A run of Weights & Biases with this run's id.

    A run that continues after an earlier step than it had reached is rewound to that step (`resume_from`), which the
    server must allow; otherwise steps that it has already are ignored until the run is past them.
    """

    def __init__(self, run: TrackedRun):
        """Raises wandb.Error without login or network."""
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, disable_git=True, disable_code=True, x_disable_stats=True
        )
        options: dict[str, Any] = {
            "project": run.project, "name": run.name, "dir": run.folder, "config": run.config, "settings": settings,
            "mode": "offline" if run.offline else None,
        }  # fmt: skip
        if run.rewinds:
            try:
                self._run = wandb.init(**options, resume_from=f"{run.id}?_step={run.resume_step}")
                return
            except wandb.Error as error:
                print(f"resume_from: {error}", flush=True)  # into the log
        self._run = wandb.init(**options, id=run.id, resume=None if run.resume_step is None else "allow")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One row of the run's history."""
        self._run.log(scalars, step=step, commit=True)

    def close(self, failed: bool = False) -> None:
        """Sends the rest."""
        self._run.finish(exit_code=int(failed))
