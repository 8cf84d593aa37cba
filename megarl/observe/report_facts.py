"""The figures at the top of a report: how far the run is, what it reached, and on what it runs."""

from statistics import fmean

from megarl.observe.metrics_file import series
from megarl.observe.progress import format_duration

# (label, metric): first and last value.
RESULTS = (
    ("held-out accuracy", "eval/accuracy"), ("reward", "reward/mean"), ("KL to reference", "kl/reference"),
    ("KL to teacher", "distill/reverse_kl"),
    ("response length", "rollout/response_length_mean"), ("fine-tuning loss", "sft/loss"),
    ("reward model's loss", "reward/loss"), ("held-out loss", "eval/loss"),
)  # fmt: skip
SOFTWARE = (("megarl", "megarl"), ("megatron-core", "megatron_core"), ("torch", "torch"), ("python", "python"))
AVERAGED_STEPS = 20


def facts(rows: list[dict], settings: dict) -> list[list[str]]:
    """[[label, value, note]] of a run; its settings may be empty.

    rows: lines of metrics.jsonl, at least one.
    """
    found = [_steps(rows, settings)]
    for label, name in RESULTS:
        _, values = series(rows, name)
        if values:
            found.append([label, f"{values[-1]:.4g}", f"from {values[0]:.4g}" if len(values) > 1 else ""])
    _, seconds = series(rows, "time/step_s")
    if seconds:
        note = f"{format_duration(sum(seconds))} in {len(seconds)} steps"
        found.append(["seconds per step", f"{fmean(seconds[-AVERAGED_STEPS:]):.3g}", note])
    _, speeds = series(rows, "perf/tokens_per_s")
    if speeds:
        found.append(["tokens per second", f"{fmean(speeds[-AVERAGED_STEPS:]):,.0f}", "mean of the last steps"])
    skipped = next((row["steps_skipped"] for row in reversed(rows) if row.get("steps_skipped") is not None), None)
    if skipped:
        found.append(["steps skipped", str(skipped), "a loss or gradient was not finite, or over a limit"])
    return found + _machine(settings)


def _steps(rows: list[dict], settings: dict) -> list[str]:
    first, last = rows[0]["step"], rows[-1]["step"]
    planned = (settings.get("megarl") or {}).get("train_iters")
    note = f"{len(rows)} recorded" if len(rows) <= last - first else f"from step {first}"
    if not isinstance(planned, int):
        return ["steps", str(last), note]
    return ["steps", f"{last} of {planned}", note if last >= planned else "runs, or ended early"]


def _machine(settings: dict) -> list[list[str]]:
    environment, ranks = settings.get("environment") or {}, settings.get("world_size")
    roles = ", ".join(settings.get("roles") or {})
    found = [["ranks", str(ranks), roles]] if ranks else []
    if environment.get("device"):
        found.append(["device", str(environment["device"]), str(environment.get("platform") or "")])
    versions = [f"{label} {environment[name]}" for label, name in SOFTWARE if environment.get(name)]
    if versions:
        commit = environment.get("git_commit")
        found.append(["software", versions[0], ", ".join(versions[1:] + ([f"commit {commit[:12]}"] if commit else []))])
    return found
