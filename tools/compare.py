#!/usr/bin/env python3
"""Compares the folders of two or more runs: settings that differ, metrics side by side, and where they part.

    python tools/compare.py runs/one runs/two
    python tools/compare.py runs/one runs/two --metrics 'reward/*' actor/loss --last 50
    python tools/compare.py runs/one runs/two --exact      exit status 1 unless all bits agree, times and memory aside

Each run is compared with the first. Floats of metrics.jsonl keep every bit, so "equal up to step 12" means equal to the
last bit. Metrics of time and memory (`tools/_metric_catalog.py`) never count as a difference, nor do settings:
the same numbers from another layout are the same numbers. `--json` prints everything as one JSON object.
"""

import fnmatch
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line  # noqa: E402
from megarl.observe import settings_file  # noqa: E402
from megarl.observe.metrics_file import FILE_NAME, read_metrics  # noqa: E402
from megarl.observe.terminal import printable, table  # noqa: E402
from megarl.plain_files import MAX_RECORDS, read_bytes, reading  # noqa: E402
from tools._metric_catalog import reproducible  # noqa: E402

SHOWN = (
    "reward/mean", "eval/accuracy", "kl/reference", "actor/loss", "actor/grad_norm", "actor/entropy", "critic/loss",
    "sft/loss", "reward/loss", "reward/accuracy", "eval/loss", "rollout/response_length_mean",
    "rollout/logprob_gap_max", "perf/tokens_per_s", "time/step_s",
)  # fmt: skip
# Parts of names of metrics of which a best value can be told; a policy loss or an entropy has none.
HIGHER_IS_BETTER = ("reward/mean", "accuracy", "eval/reward", "pass@", "maj@", "tokens_per_s", "explained_variance")
LOWER_IS_BETTER = ("sft/loss", "reward/loss", "eval/loss", "critic/loss", "logprob_gap", "time/", "memory/")
# Settings that say where a run is and how it was started, not what it does.
OF_THE_FOLDER = {"megarl.save", "megarl.load", "command_line", "user_settings.megarl", "user_settings.megatron"}


class Run(NamedTuple):
    """What the files of a run say."""

    name: str
    settings: dict[str, object]  # flat, by dotted name
    rows: dict[int, dict]  # of metrics.jsonl, by step
    samples: dict[str, bytes]  # content of each file of samples/


def read_run(path: str) -> Run:
    """Reads a run's folder. UsageError unless it holds a metrics.jsonl, or if a file is damaged."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{printable(path)}: no such folder; allowed is the folder of a run (--save)")
    with reading(path):
        rows = {row["step"]: row for row in read_metrics(folder / FILE_NAME)}
        samples = {
            file.name: read_bytes(file, MAX_RECORDS) for file in sorted((folder / "samples").glob("step_*.jsonl"))
        }
        settings = settings_file.read_settings(folder)
    return Run(path, dict(flatten(settings_file.whole(settings))), rows, samples)


def flatten(settings: dict, prefix: str = ""):
    """(dotted name, value) of nested settings."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differing_settings(runs: list[Run]) -> dict[str, list]:
    """Settings that are not the same in all runs, by name: their value in each; None: the run lacks it."""
    names = sorted({name for run in runs for name in run.settings} - OF_THE_FOLDER)
    found = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values[1:])}


def summary(run: Run, name: str, last: int) -> dict[str, float | int | None]:
    """First, last and best value of a metric, and the mean of its last values; None for what it does not have."""
    points = [(step, row[name]) for step, row in run.rows.items() if isinstance(row.get(name), (int, float))]
    if not points:
        return {"first": None, "last": None, "best": None, "best_step": None, "mean": None}
    best_step = best = None
    for choose, parts in ((max, HIGHER_IS_BETTER), (min, LOWER_IS_BETTER)):
        if any(part in name for part in parts):
            best_step, best = choose(points, key=lambda point: point[1])
    values = [value for _, value in points]
    mean = math.fsum(values[-last:]) / len(values[-last:])
    return {"first": values[0], "last": values[-1], "best": best, "best_step": best_step, "mean": mean}


def first_difference(one: Run, other: Run) -> dict:
    """Where two runs part: `equal_steps` that both have without a difference, `equal_up_to` the last of them before the
    first difference, `step` of the first difference and the `metrics` that differ there; None, [] without one.

    Steps that only one run has are no difference of their own: `missing` counts them.
    """
    common = sorted(one.rows.keys() & other.rows.keys())
    found: dict[str, Any] = {"equal_steps": 0, "equal_up_to": None, "step": None, "metrics": [],
             "missing": len(one.rows.keys() ^ other.rows.keys())}  # fmt: skip
    for step in common:
        row, theirs = reproducible(one.rows[step]), reproducible(other.rows[step])
        names = sorted({*row, *theirs})
        differing = [name for name in names if not _same(row, theirs, name)]
        if differing and found["step"] is None:
            found |= {"step": step, "metrics": differing}
        if not differing:
            found["equal_steps"] += 1
            if found["step"] is None:
                found["equal_up_to"] = step
    return found


def _same(one: dict, other: dict, name: str) -> bool:
    """Whether two rows print the same for a metric: −0.0 and 0.0 differ, 1 and 1.0 do, too."""
    return name in one and name in other and repr(one[name]) == repr(other[name])


def compare_samples(one: Run, other: Run) -> dict:
    """Numbers of samples files that both have, and that are byte-identical; the first that differs; those of one."""
    common = sorted(one.samples.keys() & other.samples.keys())
    differing = [name for name in common if one.samples[name] != other.samples[name]]
    return {"common": len(common), "equal": len(common) - len(differing), "first": next(iter(differing), None),
            "missing": len(one.samples.keys() ^ other.samples.keys())}  # fmt: skip


def chosen_metrics(runs: list[Run], patterns: list[str]) -> list[str]:
    """Names that match the patterns, or the usual ones. UsageError for a pattern that matches none."""
    names = sorted({name for run in runs for row in run.rows.values() for name in row} - {"step"})
    if not patterns:
        return [name for name in SHOWN if name in names]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"--metrics {printable(pattern)}: no metric of these runs has such a name")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def compare(runs: list[Run], patterns: list[str], last: int) -> dict:
    """Everything that `main` prints."""
    first, *others = runs
    found: dict[str, Any] = {
        "runs": [{"name": run.name, "steps": len(run.rows), "last_step": max(run.rows, default=0)} for run in runs],
        "settings": differing_settings(runs),
        "metrics": {name: [summary(run, name, last) for run in runs] for name in chosen_metrics(runs, patterns)},
        "differences": [first_difference(first, other) for other in others],
        "samples": [compare_samples(first, other) for other in others],
    }
    parts = zip(found["differences"], found["samples"], strict=True)
    found["exact"] = all(
        difference["step"] is None and not difference["missing"] and texts["first"] is None and not texts["missing"]
        for difference, texts in parts
    )
    return found


def report(found: dict, last: int) -> list[str]:
    """The lines of text that show a comparison."""
    letters = [chr(ord("A") + number) if number < 26 else f"#{number}" for number in range(len(found["runs"]))]
    lines = [
        f"{letter}  {printable(run['name'])}: {run['steps']} steps, the last is {run['last_step']}"
        for letter, run in zip(letters, found["runs"], strict=True)
    ]
    settings = [[printable(name), *map(_setting, values)] for name, values in found["settings"].items()]
    lines += ["", f"settings that differ: {len(settings)}"]
    lines += ["  " + line for line in table([["", *letters], *settings])] if settings else []
    rows = [["metric", "run", "first", "last", f"mean of {last}", "best", "at step"]]
    for name, of_runs in found["metrics"].items():
        for letter, one in zip(letters, of_runs, strict=True):
            numbers = [_number(one[key]) for key in ("first", "last", "mean", "best")]
            rows.append([printable(name) if letter == "A" else "", letter, *numbers, _number(one["best_step"])])
    lines += ["", *table(rows, right=5), ""]
    for letter, difference, texts in zip(letters[1:], found["differences"], found["samples"], strict=True):
        lines.append(f"A and {letter}: {_difference(difference)}; {_samples(texts)}")
    return lines


def _difference(found: dict) -> str:
    missing = f"; {found['missing']} steps are in one of them only" if found["missing"] else ""
    if found["step"] is None:
        return (f"metrics of all {found['equal_steps']} common steps are equal" if found["equal_steps"]
                else "no common step") + missing  # fmt: skip
    start = "differ from the first common step" if found["equal_up_to"] is None else (
        f"equal up to step {found['equal_up_to']}")  # fmt: skip
    more = f" and {len(found['metrics']) - 1} more" if len(found["metrics"]) > 1 else ""
    return f"{start}, first difference at step {found['step']}: {printable(found['metrics'][0])}{more}{missing}"


def _samples(found: dict) -> str:
    missing = f", {found['missing']} files are in one of them only" if found["missing"] else ""
    if not found["common"]:
        return "no common samples" + missing
    if found["first"] is None:
        return f"all {found['common']} samples files are equal{missing}"
    return (
        f"{found['equal']} of {found['common']} samples files are equal, the first other is {found['first']}{missing}"
    )


def _setting(value: object) -> str:
    text = printable("-" if value is None else value)
    return text if len(text) <= 40 else text[:37] + "..."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


@refuses_in_one_line("compare")
def main(argv: list[str]) -> int:
    """Returns the exit status: 1 with `--exact` and a difference, 2 for wrong input."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs (--save)")
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="NAME", help="metrics to show; * stands for any text"
    )
    parser.add_argument("--last", type=int, default=10, metavar="N", help="steps of the mean; default: %(default)s")
    parser.add_argument("--exact", action="store_true", help="exit status 1 if a metric or sample differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if len(options.runs) < 2:
        raise UsageError(f"{printable(options.runs[0])}: one run has nothing to be compared with; give two or more")
    if options.last < 1:
        raise UsageError(f"--last {options.last}: must be at least 1")
    found = compare([read_run(path) for path in options.runs], options.metrics, options.last)
    print(json.dumps(found, indent=1, default=str) if options.json else "\n".join(report(found, options.last)))
    return int(options.exact and not found["exact"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
