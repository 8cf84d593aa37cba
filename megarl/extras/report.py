"""The report of a run: report.png (curves), and report.html, one file that shows curves, samples and settings.

Needs only metrics.jsonl; settings.yaml, samples/ and tokens/ are shown if they exist: `python tools/report.py RUN`.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import UsageError
from megarl.extras import report_curves, report_samples, report_settings
from megarl.extras.report_curves import curves
from megarl.extras.report_figure import draw_report
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.settings_file import read_settings
from megarl.observe.timers import TIMELINE_FILE

PAGE = Path(__file__).with_name("report_page")
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("base.js", "numbers.js", "vendor/uPlot.iife.min.js", "chart.js", "curves.js", "samples.js", "settings.js")
LICENSE = "vendor/LICENSE"  # of uPlot: every copy has it


def write_report(run_directory: Path) -> tuple[Path, Path]:
    """Writes report.png and report.html into `run_directory`, atomically; their paths.

    UsageError when metrics.jsonl is missing or empty, or a file of the run is malformed.
    """
    directory = Path(run_directory)
    rows = _rows(directory)
    data = report_data(directory, rows=rows)
    png = draw_report(rows, f"{_name(directory)}: steps {rows[0]['step']} to {rows[-1]['step']}")
    picture, page = directory / "report.png", directory / "report.html"
    write_atomically(picture, png)
    write_atomically(page, page_of(data))
    return picture, page


def report_data(
    directory: Path, against: Path | None = None, steps: tuple[int, int] | None = None, rows: list[dict] | None = None
) -> dict:
    """What the page shows, as JSON types, of these steps (first and last), compared with the run of another directory.

    `rows`: metrics of the run, if they have been read. UsageError as `write_report`, or if no step is in the range.
    """
    others = [] if against is None else _rows(against, steps)
    rows = _rows(directory, steps) if rows is None else rows
    settings = read_settings(directory)
    other = None if against is None else read_settings(against)
    names = _names(directory, against)
    return {
        "name": names[0],
        "facts": report_curves.facts(rows, settings),
        "run": _curves_of(names[0], rows),
        "other": None if against is None else _curves_of(names[1], others),
        "samples": report_samples.samples(directory, rows),
        "timeline": TIMELINE_FILE if (directory / TIMELINE_FILE).is_file() else None,
        "command": report_settings.command_line(settings),
        "settings": report_settings.table(settings, other),
    }


def _rows(directory: Path, steps: tuple[int, int] | None = None) -> list[dict]:
    rows = read_metrics(directory / FILE_NAME)
    if not rows:
        raise UsageError(f"{directory / FILE_NAME} holds no step yet")
    if steps is None:
        return rows
    inside = [row for row in rows if steps[0] <= row["step"] <= steps[1]]
    if not inside:
        problem = f"--steps {steps[0]}-{steps[1]}: {directory / FILE_NAME} has none of them"
        raise UsageError(f"{problem}; it has steps {rows[0]['step']} to {rows[-1]['step']}")
    return inside


def _name(directory: Path) -> str:
    return directory.resolve().name


def _names(directory: Path, against: Path | None) -> tuple[str, str]:
    """The runs' names: the ends of their paths, long enough to tell them apart."""
    if against is None:
        return _name(directory), ""
    parts = [path.resolve().parts for path in (directory, against)]
    for count in range(1, max(map(len, parts))):
        one, other = ("/".join(of_run[-count:]) for of_run in parts)
        if one != other:
            break
    return one, other


def _curves_of(name: str, rows: Sequence[dict]) -> dict:
    return {"name": name, "first": rows[0]["step"], "last": rows[-1]["step"], **curves(rows)}


def page_of(data: dict) -> str:
    """The HTML page with its data, self-contained. Its policy lets the browser run this page's script and style alone.

    The data are JSON without a character that HTML could read as markup; the script writes them as text.
    """
    style = "\n".join(map(_page_file, STYLES))
    script = "\n".join([*map(_page_file, SCRIPTS), f"/* uPlot:\n{_page_file(LICENSE)}*/"])
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
    parts = {
        "title": html.escape(f"Report of {data['name']}"),
        "policy": policy + ("img-src data:; " if data["samples"].get("images") else "") + "form-action 'none'",
        "style": style,
        "script": script,
        "data": embedded_json(data),
    }
    # One pass: a text of the data that looks like a placeholder stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _page_file("page.html"))


def _page_file(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded_json(data: object) -> str:
    """ASCII JSON that holds no `<`, `>` or `&`, so it can neither end a script element nor open one."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
