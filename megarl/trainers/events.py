"""After which steps a run evaluates, saves and exports: what the trainers ask, and what `--check` prints."""

from dataclasses import dataclass

from megarl.arguments import RunConfig


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether an action is due after a step that runs every `interval` steps (0: never) and after the last one."""
    return step == last or bool(interval and step % interval == 0)


@dataclass(frozen=True)
class RunEvents:
    """The events of a run that does steps `first` to `last`; a signal, a limit or a target may end it earlier.

    `keeps_best`: it also saves after an evaluation that is the best so far. `exports`: folders that get a folder with
    each checkpoint.
    """

    first: int
    last: int
    evaluates: bool
    evaluates_before: bool
    eval_interval: int
    saves: bool
    save_interval: int
    keeps_best: bool
    exports: tuple[str, ...]

    def evaluations(self) -> list[int]:
        """Steps after which held-out prompts are evaluated; 0: before the first."""
        return [0] * self.evaluates_before + self._due(self.eval_interval) * self.evaluates

    def checkpoints(self) -> list[int]:
        """Steps after which a checkpoint is saved for certain, and with it the exports."""
        return self._due(self.save_interval) * self.saves

    def _due(self, interval: int) -> list[int]:
        return [step for step in range(self.first, self.last + 1) if is_due(step, interval, self.last)]


def events_of(config: RunConfig, done: int) -> RunEvents:
    """The events of a training run. `done`: steps of the checkpoint from which it resumes; 0 for a new run."""
    s = config.settings
    saves = s.save is not None and not s.debug_rollout_only  # which changes no weights
    return RunEvents(
        first=done + 1,
        last=s.train_iters,
        evaluates=s.evaluates,
        evaluates_before=s.evaluates and "rollout" in config.roles and not done,
        eval_interval=s.eval_interval,
        saves=saves,
        save_interval=s.save_interval,
        keeps_best=saves and s.evaluates and s.keep_best,
        exports=tuple(name for name, wanted in (("hf", s.export_hf), ("peft", s.export_peft)) if wanted and saves),
    )
