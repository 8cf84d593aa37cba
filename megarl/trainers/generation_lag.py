"""Generation that is not in step with training: which ranks are ahead, and which schedule the rounds follow.

With `--generation-lag S` leading ranks are S iterations ahead of the ranks that train. The rollout leads, and so do the
frozen roles on ranks without a trained role, but for a reference that is refreshed. Nothing that a leading rank waits
for within an iteration comes from a rank that trains, but for the weights of S steps before.
"""

import json
from pathlib import Path

from megarl.arguments import RoleSettings, RunConfig, Settings
from megarl.checkpoint import folders, resume
from megarl.errors import UsageError, flag_of
from megarl.flags.distillation import SIBLING
from megarl.rollout import schedule, waiting_groups
from megarl.rollout.schedule import Recording, Schedule

_TRAINED = ("actor", "critic")
_FROZEN = ("reward", "reference", "teacher")


def _with_training(s: Settings) -> tuple[str, ...]:
    """Roles that keep pace with training: a refreshed reference needs a step's weights in the next."""
    return (*_TRAINED, "reference") if s.reference_update_interval else _TRAINED


def leading_ranks(s: Settings, roles: dict[str, RoleSettings]) -> set[int]:
    """The ranks of the rollout and of frozen roles without a rank of a role that keeps pace with training."""
    trained = {rank for name in _with_training(s) if name in roles for rank in roles[name].ranks}
    frozen = [set(roles[name].ranks) for name in _FROZEN if name in roles]
    return set(roles["rollout"].ranks).union(*(ranks for ranks in frozen if not ranks & trained))


def check_lead(s: Settings, roles: dict[str, RoleSettings]):
    """UsageError if the ranks of some role cannot all have the same lead."""
    if not s.generation_lag or s.debug_train_only:
        return
    lag, leading = s.generation_lag, leading_ranks(s, roles)
    for name in _with_training(s):
        if name in roles and not leading.isdisjoint(roles[name].ranks):
            why = f" (--reference-update-interval {s.reference_update_interval})" if name == "reference" else ""
            raise UsageError(
                f"--generation-lag {lag}: needs a rollout in --role-map on other ranks than the {name}{why}"
            )
    for name in _FROZEN:
        ranks = set(roles[name].ranks) if name in roles else set()
        if ranks & leading and ranks - leading:
            raise UsageError(
                f"--generation-lag {lag}: the {name} shares ranks with the rollout and with a role that is trained; "
                "allowed in --role-map is one of the two"
            )
    needs_scores = {"--group-filter": s.group_filter != "none", "--pool-bounds": s.pool_bounds is not None}
    needs_scores |= {"--greedy-baseline": s.greedy_baseline, "--teacher-context": s.teacher_context == SIBLING}
    if any(needs_scores.values()) and not leading.issuperset(roles["reward"].ranks):
        names = " and ".join(name for name, is_set in needs_scores.items() if is_set)
        raise UsageError(
            f"--generation-lag {lag}: {names} needs the scores of a batch before it is trained on; put the reward in "
            "--role-map on other ranks than actor and critic"
        )


_NOT_COMPARED = "--generation-schedule"  # of the settings: a schedule is replayed with another one


def read_schedule(
    config: RunConfig, data: dict[str, dict[str, str]], resumed: Path | None, manifest: dict
) -> Schedule | None:
    """What the rounds of the run follow: another run's schedule, or with `recorded` what this run wrote after the
    checkpoint from which it resumes. None: the weights are fixed.

    Args:
        data: `resume.data_fingerprints` of the run.
        resumed, manifest: its checkpoint; None for a new run.

    Raises:
        UsageError: a damaged or incomplete schedule, or one of another run.
    """
    s = config.settings
    if not s.is_scheduled:
        return None
    start, first, run = 0, 1, _run_entry(config, data)
    if resumed is not None:
        start, first = manifest["step"], waiting_groups.queued(manifest)["through"] + 1
    if s.generation_schedule == "recorded":
        assert s.save is not None  # a rule of the flags
        folder, recording = Path(s.save) / schedule.FOLDER, Recording("", {}, {})
        if folders.is_of_run(resumed, s.save):
            recording = Recording.read(folder, "--save", s.save)
            later = [step for step, _ in recording.rounds if step >= first]
            try:
                _check_schedule(recording, range(first, max(later, default=0) + 1), run, s, start)
            except UsageError as error:
                raise UsageError(f"{error}; move {folder} away, and the clock decides again") from None
        return Schedule(recording, start, folder, run)
    assert s.replay_schedule is not None
    recording = Recording.read(_folder_of(s.replay_schedule), "--replay-schedule", s.replay_schedule)
    _check_schedule(recording, range(first, s.train_iters + 1), run, s, start)
    return Schedule(recording, start, None, run)


def _folder_of(path: str) -> Path:
    folder = Path(path) / schedule.FOLDER if (Path(path) / schedule.FOLDER).is_dir() else Path(path)
    if not any(folder.glob(schedule.FILES)):
        raise UsageError(
            f"--replay-schedule {path}: holds no schedule; allowed is the folder of a run with --generation-schedule "
            "recorded"
        )
    return folder


def _run_entry(config: RunConfig, data: dict[str, dict[str, str]]) -> dict:
    """The schedule's record about the run: what decides its responses, besides the model."""
    settings = {name: value for name, value in resume.settings_entry(config).items() if name != _NOT_COMPARED}
    hashes = {name: entry["sha256"] for name, entry in data.items() if not resume.is_held_out(name)}
    return json.loads(json.dumps({"seed": config.settings.seed, "data": hashes, "settings": settings}))


def _check_schedule(recording: Recording, steps: range, run: dict, settings: Settings, start: int):
    """UsageError unless the run, which begins after `start`, can follow the rounds of these steps."""
    there, where = {step for step, _ in recording.rounds}, recording.path
    if missing := next((step for step in steps if step not in there), None):
        raise UsageError(
            f"{where}: the schedule has no step {missing}, but steps {min(there, default=0)} to "
            f"{max(there, default=0)}; this run follows it from step {steps[0]} to {steps[-1]}"
        )
    held = 0
    for number in (number for number in recording.rounds if number[0] in steps):
        record = recording.rounds[number]
        problem = _difference(recording.runs[number], run) or schedule.check(record, settings, start)
        if not problem and record.first < held:
            problem = f"step {number[0]} begins with older weights than the round before it ended with"
        if problem:
            raise UsageError(f"{where}: {problem}")
        held = record.last


def _difference(recorded: dict, run: dict) -> str | None:
    """What differs between the run that recorded a schedule and the one that follows it; None: nothing."""
    if recorded.get("seed") != run["seed"]:
        return f"was recorded with --seed {recorded.get('seed')}; this run has {run['seed']}"
    for name, digest in run["data"].items():
        if recorded["data"].get(name, digest) != digest:
            return f"was recorded with another {flag_of(name)}"
    changed = resume.changed_settings({resume.SETTINGS: recorded["settings"]}, run["settings"])
    return f"was recorded with other settings: {changed}" if changed else None
