"""Writes docs/figures.md, the page of all measured figures, from docs/figures.yaml and the files of curves beside it.

    python tools/make_figures.py            # writes the page
    python tools/make_figures.py --check    # exit status 1 if the page is not what this program would write

A new measurement changes docs/figures.yaml: its numbers, and when, on what and by which command it was recorded.
Other pages name at most one ratio of a figure, with a link to it.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import fmean

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.curves import interval  # noqa: E402  the checkout's own code

DOCS = ROOT / "docs"
LAST = 110  # step of the curves
LAGS = (1, 2, 4, 8)
NEEDED = {"title", "recorded", "processor", "ratio"}
HEAD = """<!-- Made by tools/make_figures.py from docs/figures.yaml; do not edit. -->

# Figures

Everything that was measured, with its date, commit, processor and command. Other pages name one number of a figure and
link to it. **Real** devices ran the program. **Emulated** devices ran it with a CPU's numbers in the place of a GPU's.
**Simulated** devices have shapes and no numbers. Run benchmarks with `PYTHONPATH=.` in a checkout.
"""


def read() -> dict:
    """The content of docs/figures.yaml; ValueError for a figure that lacks what each one has."""
    content = yaml.safe_load((DOCS / "figures.yaml").read_text(encoding="utf-8"))
    for figure in figures(content):
        missing = sorted(NEEDED - figure.keys())
        if missing or not {"command", "how"} & figure.keys():
            raise ValueError(f"{figure['title']}: lacks {', '.join(missing) or 'command, or how'}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d [0-9a-f]{8}", figure["recorded"]):
            raise ValueError(f"{figure['title']}: recorded is no date and commit: {figure['recorded']}")
    return content


def figures(content: dict) -> list[dict]:
    """All figures, in order."""
    return [figure for section in content["sections"] for figure in section["figures"]]


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; ValueError for a row of another length."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns: {row}")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(" | ".join(line) for line in lines)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


# -- tables of curves --------------------------------------------------------------------------------------------


def curves_of(name: str) -> list[dict]:
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def span(values: list[float]) -> str:
    """Mean, smallest and largest of percentages."""
    return f"{fmean(values):.1f} % ({min(values):.1f}–{max(values):.1f})"


def over_run(curve: dict) -> float:
    """The mean accuracy over a run's evaluations but the one before training, in per cent."""
    return 100 * fmean(curve["accuracy"][1:])


def recipe_rows() -> list[list[str]]:
    """A line for each recipe of curves.json and curves_newer.json, with its difference to GRPO seed by seed."""
    older, newer = curves_of("curves.json"), curves_of("curves_newer.json")
    base = {curve["seed"]: over_run(curve) for curve in older if curve["recipe"] == "grpo"}
    curves = older + [curve for curve in newer if curve["recipe"] != "grpo"]
    rows = []
    for recipe in dict.fromkeys(curve["recipe"] for curve in curves):
        seeds = [curve for curve in curves if curve["recipe"] == recipe]
        last = [100 * curve["accuracy"][curve["steps"].index(LAST)] for curve in seeds]
        means = {curve["seed"]: over_run(curve) for curve in seeds}
        difference = interval([mean - base[seed] for seed, mean in means.items()]) if recipe != "grpo" else ""
        average = f"{fmean(means.values()):.1f} %"
        rows.append([f"`{recipe}`", span(last), average, difference])
    return rows


def lag_rows(name: str) -> list[list[str]]:
    """A line for each correction of a file: last accuracy by lag, and the difference to lag 0 seed by seed."""
    curves, cells_of = curves_of(name), {}
    means = {(curve["recipe"], curve["seed"]): over_run(curve) for curve in curves}
    for recipe in dict.fromkeys(curve["recipe"] for curve in curves):
        seeds = [curve for curve in curves if curve["recipe"] == recipe]
        last = fmean(100 * curve["accuracy"][-1] for curve in seeds)
        found = [means[recipe, curve["seed"]] - means["lag 0", curve["seed"]] for curve in seeds]
        difference = f" ({fmean(found):+.1f}; {min(found):+.1f} to {max(found):+.1f})" if recipe != "lag 0" else ""
        cells_of[recipe] = f"{last:.1f} %{difference}"
    corrections = dict.fromkeys(name.split("/")[0] for name in cells_of if "/" in name)
    base = cells_of["lag 0"]
    return [[f"{name}; lag 0: {base}", *(cells_of[f"{name}/lag {lag}"] for lag in LAGS)] for name in corrections]


RECIPE_COLUMNS = ["recipe", f"after {LAST} steps", "mean over the run", "difference to `grpo`"]
LAG_COLUMNS = ["correction", *(f"lag {lag}" for lag in LAGS)]


# -- the page ----------------------------------------------------------------------------------------------------


def table_of(figure: dict) -> str:
    """The table of a figure; "" if it has none."""
    if "curves" in figure:
        if figure["curves"] == "curves.json":
            return table(RECIPE_COLUMNS, recipe_rows())
        return table(LAG_COLUMNS, lag_rows(figure["curves"]))
    if "rows" not in figure:
        return ""
    return table(cells(figure["columns"]), [cells(line) for line in figure["rows"].strip("\n").split("\n")])


def figure_text(figure: dict, processors: dict[str, str]) -> str:
    """A figure's part of the page."""
    date, commit = figure["recorded"].split()
    done = f"`{figure['command']}`" if "command" in figure else figure["how"]
    processor = f"`{figure['processor']}`" if figure["processor"] in processors else figure["processor"]
    record = f"**{figure['ratio']}**. {date} ({commit}), {processor}. {done}"
    parts = [f"### {figure['title']}", record, figure.get("text", ""), table_of(figure), figure.get("after", "")]
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """docs/figures.md."""
    content = read()
    legend = table(["name", "processor"], [[f"`{name}`", text] for name, text in content["processors"].items()])
    parts = [HEAD.rstrip("\n"), legend]
    for section in content["sections"]:
        parts += [f"## {section['title']}", section.get("text", "")]
        parts += [figure_text(figure, content["processors"]) for figure in section["figures"]]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main(argv: list[str]) -> int:
    """Writes or compares the page; the exit status."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    arguments.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    path, text = DOCS / "figures.md", page()
    if arguments.parse_args(argv).check:
        if path.read_text(encoding="utf-8") != text:
            print("make_figures: docs/figures.md is stale; run python tools/make_figures.py", file=sys.stderr)
            return 1
        return 0
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
