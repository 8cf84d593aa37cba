"""The report of a run: report.png (curves) and report.html (curves, table, settings, samples) in the run's directory.

    python -m megarl.observe.report RUN_DIRECTORY

Needs only metrics.jsonl; settings.yaml and samples/ are shown if they exist. It can run while the job is training.
"""

import argparse
import base64
import html
import json
import sys
from pathlib import Path

from megarl.errors import UsageError
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.report_axes import series
from megarl.observe.report_figure import draw_report

SAMPLE_ROWS = 20

# Better direction by metric name or its suffix; for all other metrics "best" is empty.
HIGHER_IS_BETTER = (
    "/mean", "accuracy", "reward/margin", "explained_variance", "tokens_per_s", "perf/mfu", "router/replayed_fraction"
)  # fmt: skip
LOWER_IS_BETTER = (
    "critic/loss", "sft/loss", "reward/loss", "eval/loss", "/failures", "cut_fraction", "rollout/logprob_gap_max",
    "rollout/logprob_gap_mean", "router/disagreement",
    "router/load_imbalance", "router/gap_live", "router/gap_replayed", "_s", "_bytes", "idle_fraction", "steps_skipped",
)  # fmt: skip

STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1c1c1c; }
img { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.8rem; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre, td.text { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: #f6f6f6; padding: 1rem; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: bold; }
"""


def write_report(run_directory: Path) -> tuple[Path, Path]:
    """Write report.png and report.html into `run_directory` and return their paths; both are written atomically.

    Raises UsageError when metrics.jsonl is missing, empty or malformed.
    """
    directory = Path(run_directory)
    rows = read_metrics(directory / FILE_NAME)
    if not rows:
        raise UsageError(f"{directory / FILE_NAME} holds no step yet")
    name = directory.resolve().name
    png = draw_report(rows, f"{name}: steps {rows[0]['step']} to {rows[-1]['step']}")
    picture, page = directory / "report.png", directory / "report.html"
    write_atomically(picture, png)
    write_atomically(page, _page(name, png, rows, directory))
    return picture, page


def _page(name: str, png: bytes, rows: list[dict], directory: Path) -> str:
    """The HTML page, self-contained."""
    title = html.escape(f"Report of {name}")
    sections = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>Steps {rows[0]['step']} to {rows[-1]['step']}, {len(rows)} recorded.</p>",
        f'<img alt="curves of the run" src="data:image/png;base64,{base64.b64encode(png).decode()}">',
        _metrics_table(rows),
        _settings(directory / "settings.yaml"),
        _samples(directory / "samples"),
        "</body></html>\n",
    ]
    return "\n".join(section for section in sections if section)


def _metrics_table(rows: list[dict]) -> str:
    """First, last, best, smallest and largest value of every metric."""
    header = "".join(f'<th class="number">{text}</th>' for text in ("first", "last", "best", "min", "max"))
    lines = [f"<h2>Metrics</h2>\n<table><tr><th>metric</th>{header}</tr>"]
    for name in sorted({key for row in rows for key in row} - {"step"}):
        steps, values = series(rows, name)
        if values:
            best = best_index(name, values)
            best_text = "" if best is None else f"{values[best]:.6g} (step {steps[best]})"
            cells = [f"{value:.6g}" for value in (values[0], values[-1])]
            cells += [best_text, f"{min(values):.6g}", f"{max(values):.6g}"]
        else:
            cells = ["not finite"] * 2 + [""] * 3
        row = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        lines.append(f"<tr><td>{html.escape(name)}</td>{row}</tr>")
    return "\n".join(lines) + "\n</table>"


def best_index(name: str, values: list[float]) -> int | None:
    """Index of the first best value, or None for a metric that has no better direction (entropy, a coefficient)."""
    # tokens_per_s also ends in _s like a time, so check HIGHER_IS_BETTER first.
    if name.endswith(HIGHER_IS_BETTER):
        return values.index(max(values))
    if name.endswith(LOWER_IS_BETTER):
        return values.index(min(values))
    return None


def _settings(path: Path) -> str:
    if not path.is_file():
        return ""
    text = html.escape(path.read_text(encoding="utf-8", errors="replace"))
    return f"<details><summary>Settings</summary><pre>{text}</pre></details>"


def _samples(directory: Path) -> str:
    """The first rows of the latest samples file. All texts are escaped, because they come from a model."""
    files = sorted(directory.glob("step_*.jsonl"))
    if not files:
        return ""
    columns = ("prompt", "response", "reward", "reward_parts", "correct", "length", "finished")
    # Not splitlines(): text may contain other characters that it treats as line ends.
    records = [json.loads(line) for line in files[-1].read_bytes().split(b"\n")[:SAMPLE_ROWS] if line]
    lines = [f"<h2>Samples</h2>\n<p>First {len(records)} of samples/{html.escape(files[-1].name)}.</p>", "<table><tr>"]
    lines += [f"<th>{column}</th>" for column in columns]
    lines.append("</tr>")
    for record in records:
        cells = (_cell(record.get(column)) for column in columns)
        lines.append("<tr>" + "".join(f'<td class="text">{cell}</td>' for cell in cells) + "</tr>")
    return "\n".join(lines) + "\n</table>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 2 with one line on stderr for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m megarl.observe.report", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="the run's directory, which holds metrics.jsonl")
    try:
        paths = write_report(parser.parse_args(arguments).directory)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
