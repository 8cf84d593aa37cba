"""The report of a run: report.png (curves), and report.html, one file that shows curves, samples and settings.

Needs only metrics.jsonl; settings.yaml, samples/ and tokens/ are shown if they exist: `python tools/report.py RUN`.
"""

import base64
import hashlib
import html
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import UsageError
from megarl.extras import report_curves, report_samples
from megarl.extras.report_curves import curves
from megarl.extras.report_figure import draw_report
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.settings_file import COMMAND_LINE, USER_SETTINGS, read_settings, whole
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
        "command": command_line(settings),
        "settings": settings_table(settings, other),
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


# -- settings.yaml as a table, compared with another run's -----------------------------------------------------------

SECTIONS = ("run", "environment", "megarl", "roles", "megatron")  # in the order of the table


def settings_table(settings: dict, other: dict | None) -> list[list]:
    """Rows [section, name, value, other value, whether they differ, whether the user set it in one of the runs].

    Those that the user set come first. A value is its text, or null if there is none. A Megatron flag that is the same
    for all roles has one row, else one for each role: `lr · critic`. `other`: of the run to compare with.
    """
    flat = [_flatten(whole(settings)), _flatten(whole(other or {}))]
    split = set().union(*map(_differ_by_role, flat))

    def row_of(key: tuple[str, ...]) -> tuple[str, ...]:  # without the role, if it makes no difference
        return key[:2] if key[0] == "megatron" and key[1] not in split else key

    own, others = ({row_of(key): value for key, value in of_run.items()} for of_run in flat)
    by_user = {key for of_run in (settings, other or {}) for key in _set_by_user(of_run, {*own, *others})}
    rows, order = [], {section: number for number, section in enumerate(SECTIONS)}
    for key in sorted({*own, *others}, key=lambda key: (key not in by_user, order.get(key[0], len(order)), key)):
        values = [own.get(key), others.get(key)]
        differs = other is not None and values[0] != values[1]
        rows.append([key[0], " · ".join(key[1:]), *values, differs, key in by_user])
    return rows


def command_line(settings: dict) -> str | None:
    """The command line of a run as text for a shell; None if its settings do not have it."""
    words = settings.get(COMMAND_LINE)
    return shlex.join(map(str, words)) if isinstance(words, list) and words else None


def _set_by_user(settings: dict, keys: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The keys of rows that a run's user set; none if the file does not say so (earlier versions)."""
    said, roles = settings.get(USER_SETTINGS), settings.get("roles")
    if not isinstance(said, dict):
        return set()
    lists = [name for name in ("megarl", "megatron") if isinstance(said.get(name), list)]
    names = {section: set(map(str, said[section])) for section in lists}
    prefixes = [f"{role}_" for role in roles] if isinstance(roles, dict) else []

    def is_set(key: tuple[str, ...]) -> bool:
        section, name, *role = key
        if section == "roles":  # the row is named by the role, then the setting
            return any({each, f"{name}_{each}"} & names.get("megarl", set()) for each in role)
        own = [f"{role[0]}_"] if role else prefixes
        given = names.get(section, set())
        return name in given or section == "megatron" and any(prefix + name in given for prefix in own)

    return set(filter(is_set, keys))


def _flatten(settings: dict) -> dict[tuple[str, ...], str]:
    """Settings by (section, name …); Megatron's flags by ("megatron", name, role)."""
    found: dict[tuple[str, ...], str] = {}
    for key, value in settings.items():
        if key == "roles" and isinstance(value, dict):
            for role, of_role in value.items():
                found |= _flatten_role(str(role), of_role)
        elif key in (COMMAND_LINE, USER_SETTINGS):
            continue
        elif isinstance(value, dict):
            found |= {(str(key), str(name)): _text(inner) for name, inner in value.items()}
        else:
            found["run", str(key)] = _text(value)
    return found


def _flatten_role(role: str, settings: object) -> dict[tuple[str, ...], str]:
    if not isinstance(settings, dict):
        return {("roles", role): _text(settings)}
    flags = settings.get("megatron")
    found: dict[tuple[str, ...], str] = {}
    found |= {("megatron", str(flag), role): _text(v) for flag, v in flags.items()} if isinstance(flags, dict) else {}
    return found | {("roles", role, str(name)): _text(v) for name, v in settings.items() if name != "megatron"}


def _differ_by_role(flat: dict[tuple[str, ...], str]) -> set[str]:
    """Names of Megatron's flags that some roles lack, or that have several values."""
    roles, values = {key[2] for key in flat if key[0] == "megatron"}, {}
    for key, value in flat.items():
        if key[0] == "megatron":
            values.setdefault(key[1], []).append(value)
    return {name for name, found in values.items() if len(found) < len(roles) or len(set(found)) > 1}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
