"""The report of a run: report.png (curves), and report.html, one file that shows curves, samples, time line, settings.

Needs only metrics.jsonl; settings.yaml, samples/, tokens/ and timeline.json are shown if they exist. It can be made
while the job is training: `python tools/report.py RUN`.
"""

import argparse
import base64
import hashlib
import html
import json
import re
import sys
from pathlib import Path

from megarl.errors import ArgumentParser, UsageError
from megarl.observe import report_facts, report_samples, report_settings, report_timeline
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.report_curves import curves
from megarl.observe.report_figure import draw_report

PAGE = Path(__file__).with_name("report_page")
SCRIPTS = ("base.js", "chart.js", "curves.js", "samples.js", "timeline.js", "settings.js")
TIMELINE = "timeline.json"


def write_report(run_directory: Path) -> tuple[Path, Path]:
    """Write report.png and report.html into `run_directory` and return their paths; both are written atomically.

    Raises UsageError when metrics.jsonl is missing or empty, or a file of the run is malformed.
    """
    directory = Path(run_directory)
    rows = _rows(directory)
    data = _data(directory, rows)
    png = draw_report(rows, f"{_name(directory)}: steps {rows[0]['step']} to {rows[-1]['step']}")
    picture, page = directory / "report.png", directory / "report.html"
    write_atomically(picture, png)
    write_atomically(page, page_of(data))
    return picture, page


def report_data(directory: Path, against: Path | None = None, steps: tuple[int, int] | None = None) -> dict:
    """What the page shows, as JSON types.

    Args:
        directory: of the run.
        against: directory of the run to compare with.
        steps: first and last step that the report covers; None: all.

    Raises:
        UsageError: as `write_report`, or no step in the range.
    """
    others = None if against is None else _rows(against, steps)
    return _data(directory, _rows(directory, steps), against, others)


def _data(directory: Path, rows: list[dict], against: Path | None = None, others: list[dict] | None = None) -> dict:
    """`report_data` from the metrics of the run and of the other one, `others`."""
    settings = report_settings.read_settings(directory)
    other = None if against is None else report_settings.read_settings(against)
    trace, names = directory / TIMELINE, _names(directory, against)
    roles = report_settings.ranks_of_roles(settings)
    return {
        "name": names[0],
        "facts": report_facts.facts(rows, settings),
        "run": _curves_of(names[0], rows),
        "other": None if against is None else _curves_of(names[1], others),
        "samples": report_samples.samples(directory, rows),
        "timeline": report_timeline.timeline(trace, roles) if trace.is_file() else None,
        "shares": report_timeline.shares(rows),
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
        raise UsageError(
            f"--steps {steps[0]}-{steps[1]}: {directory / FILE_NAME} has none of them; it has steps {rows[0]['step']} "
            f"to {rows[-1]['step']}"
        )
    return inside


def _name(directory: Path) -> str:
    return directory.resolve().name


def _names(directory: Path, against: Path | None) -> tuple[str, str | None]:
    """The runs' names: the ends of their paths, long enough to tell them apart."""
    if against is None:
        return _name(directory), None
    parts = [path.resolve().parts for path in (directory, against)]
    for count in range(1, max(map(len, parts))):
        one, other = ("/".join(of_run[-count:]) for of_run in parts)
        if one != other:
            break
    return one, other


def _curves_of(name: str, rows: list[dict]) -> dict:
    found = {"name": name, "first": rows[0]["step"], "last": rows[-1]["step"], "count": len(rows)}
    return found | curves(rows)


def page_of(data: dict) -> str:
    """The HTML page with its data, self-contained.

    Its policy (Content-Security-Policy) lets the browser run this page's script and style alone, and load nothing.
    The data are JSON without a character that HTML could read as markup; the script writes them as text.
    """
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
    parts = {
        "title": html.escape(f"Report of {data['name']}"),
        "policy": policy + "form-action 'none'",
        "style": style,
        "script": script,
        "data": embedded_json(data),
    }
    # One pass: a text of the data that looks like a placeholder stays what it is.
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded_json(data: object) -> str:
    """ASCII JSON that holds no `<`, `>` or `&`, so it can neither end a script element nor open one."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UsageError(f"--steps {text}: allowed is FIRST-LAST, as 100-200")
    return int(first), int(last)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked. Raises UsageError."""
    parser = ArgumentParser(prog="report", allow_abbrev=False,
                            description="Makes the report of a run, which may still be training.")  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, which holds metrics.jsonl")
    parser.add_argument("--against", type=Path, metavar="RUN", help="another run: overlaid curves, changed settings")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="steps that the report covers; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the page; default: report.html, and "
                        "report.png, in RUN, or report-against-NAME.html with --against")  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.steps = _steps(arguments.steps) if arguments.steps else None
    for flag, folder in (("RUN", arguments.run), ("--against", arguments.against)):
        if folder is not None and not (folder / FILE_NAME).is_file():
            raise UsageError(f"{flag} {folder}: not the folder of a run, it has no {FILE_NAME}")
    if arguments.against and arguments.against.resolve() == arguments.run.resolve():
        raise UsageError(f"--against {arguments.against}: allowed is another run than {arguments.run}")
    if arguments.out and not arguments.out.parent.is_dir():
        raise UsageError(f"--out {arguments.out}: no such folder {arguments.out.parent}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 2 with one line on stderr for wrong input."""
    try:
        arguments = parse_arguments(argv)
        run, against = arguments.run, arguments.against
        if against is None and arguments.steps is None and arguments.out is None:
            paths = write_report(run)
        else:
            name = f"report-against-{_name(against)}.html" if against else "report.html"
            paths = (arguments.out or run / name,)
            write_atomically(paths[0], page_of(report_data(run, against, arguments.steps)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
