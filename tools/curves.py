"""Learning curves of the algorithms: a run of every recipe and seed from one warm start, as a figure and a table.

    python tools/curves.py --out runs/curves
    python tools/curves.py --out runs/curves --recipes gspo gmpo --seeds 1 --steps 60 --warm-start runs/quickstart
    python tools/curves.py --out runs/mine --runs small=runs/a small=runs/b large=runs/c
    python tools/curves.py --out runs/rates --recipes grpo --variants "once=" "twice=--lr 4e-4" --metrics actor/entropy

The task is the quickstart's: sums of two two-digit numbers; the warm start ends earlier, so that every recipe has
something to gain. Writes to `--out`: data/ and sft/ (prompts, tokenizer and warm start, unless `--warm-start` has
them), a folder RECIPE/seedN per run, curves.png and curves.json. Runs are parallel, each on one rank with one thread.
Complete runs are not repeated, so the same command resumes after an
interruption; a run whose command or config files have changed is repeated. With `--runs` nothing is run: the figure is
of runs that are there, of any task.

A seed is the same prompts and random numbers in each recipe, so a second table has their differences to the first one,
seed by seed, with a 95 % interval of the mean. `--variants` runs one recipe with several sets of flags, and compares
them likewise. A name GROUP/VARIANT belongs to the panel of its group, a name without a group to all panels.

Exit status 1: a run failed, or a run gained fewer than `--min-gain` points of held-out accuracy; 2: wrong use.
"""

import argparse
import concurrent.futures
import hashlib
import io
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.settings_file import FILE_NAME as SETTINGS_NAME
from megarl.observe.settings_file import read_settings

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
RECIPES = ("ppo", "grpo", "rloo", "reinforce_plus_plus", "dapo")
START = 2  # seed of prompts and warm start
START_LOSS = "0.3"  # held-out loss at which the warm start ends
# Student's t of 95 % for 1, 2 … degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
DONE = "done.json"  # command and file hashes of a complete folder


class RunFailed(Exception):
    """A command failed; the message names its folder and its log."""


class Curve(NamedTuple):
    """Evaluations of one run, from that before the first step on."""

    recipe: str  # or the variant
    seed: int
    steps: list[int]
    accuracy: list[float]  # fraction of held-out prompts answered correctly
    tokens: list[int]  # tokens generated so far, including filtered ones
    metrics: dict[str, float]  # means of `--metrics` over the second half of the run; those that it has

    @property
    def gain(self) -> float:
        """Points of accuracy, from the first evaluation to the last."""
        return 100 * (self.accuracy[-1] - self.accuracy[0])

    @property
    def mean(self) -> float:
        """Mean accuracy of the evaluations after the first, in percent. It varies less than that of the last one."""
        return 100 * statistics.fmean(self.accuracy[1:])


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked. Raises UsageError."""
    paths = (CONFIGS / "recipes").glob("*.yaml")
    names = sorted(path.stem for path in paths if "\nadvantage:" in path.read_text())  # others are of train_preference
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for runs, figure and numbers")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=names, metavar="NAME",
                        help=f"recipes to run: {', '.join(names)}; default: {' '.join(RECIPES)}")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of each recipe; default: 1 2 3")
    parser.add_argument("--steps", type=int, help="steps per run; default: that of the config files")
    parser.add_argument(
        "--variants",
        nargs="+",
        type=named_flags,
        default=[],
        metavar="NAME=FLAGS",
        help="run one recipe with each of these sets of flags; the first is what others are compared to",
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a run; default: 1")
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="NAME", help="print their means over the second half of each run"
    )
    parser.add_argument("--config", nargs="+", metavar="FILE", help="config files of all runs, before their recipe",
                        default=[str(CONFIGS / "quickstart.yaml"), str(CONFIGS / "curves.yaml")])  # fmt: skip
    parser.add_argument("--warm-start", metavar="DIR", help="folder with data/ and sft/, as the quickstart writes them")
    parser.add_argument("--runs", nargs="+", type=named_run, metavar="NAME=DIR",
                        help="draw these runs instead; several with one name are its seeds")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel runs; default: number of CPUs")
    parser.add_argument(
        "--min-gain", type=float, default=15.0, help="points of accuracy that every run must gain; default: %(default)s"
    )
    chosen = parser.parse_args(argv)
    minima = (
        ("jobs", chosen.jobs, 1), ("ranks", chosen.ranks, 1), ("steps", chosen.steps, 1),
        ("seeds", min(chosen.seeds), 0),
    )  # fmt: skip
    for flag, value, minimum in minima:
        if value is not None and value < minimum:
            raise UsageError(f"--{flag} {value}: must be at least {minimum}")
    if chosen.variants and len(chosen.recipes) > 1:
        raise UsageError("--variants needs one recipe: add --recipes NAME")
    needed = [("config", file, Path(file)) for file in chosen.config]
    if chosen.warm_start:
        needed += [("warm-start", chosen.warm_start, Path(chosen.warm_start) / name) for name in ("data", "sft")]
    for flag, value, path in needed:
        if not path.exists():
            raise UsageError(f"--{flag} {value}: {path} does not exist")
    chosen.config = [str(Path(file).absolute()) for file in chosen.config]  # commands run in the checkout
    return chosen


def named_run(text: str) -> tuple[str, Path]:
    """(name, folder) of a value of `--runs`."""
    name, separator, folder = text.partition("=")
    needed = (FILE_NAME, SETTINGS_NAME)
    if not (name and separator and all((Path(folder) / file).is_file() for file in needed)):
        raise argparse.ArgumentTypeError(
            f"{text}: allowed is NAME=DIR, the folder of a run with {' and '.join(needed)}"
        )
    return name, Path(folder)


def named_flags(text: str) -> tuple[str, list[str]]:
    """(name, flags) of a value of `--variants`."""
    name, separator, flags = text.partition("=")
    if not (name and separator) or name.count("/") > 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is NAME=FLAGS or GROUP/NAME=FLAGS")
    return name, shlex.split(flags)


def ensure(folder: Path, command: list[str], files: list[str]) -> bool:
    """Runs a command that fills a folder, unless the folder is complete. Returns whether it ran.

    Args:
        command: runs in the checkout with this Python's environment; its output goes to `folder`.log.
        files: its config files and scripts; if one of them changes, the command runs again.

    Raises:
        RunFailed: the command failed.
    """
    sums = {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
    # Without the interpreter's path, which has several names.
    made_from = json.dumps({"arguments": command[1:], "files": sums}, indent=1) + "\n"
    done = folder / DONE
    if done.exists() and done.read_text() == made_from:
        return False
    done.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    env = {"MEGARL_VENV": sys.prefix, **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as output:
        status = subprocess.call(command, cwd=ROOT, env=env, stdout=output, stderr=output)
    if status:
        raise RunFailed(f"{folder}: its command ended with status {status}; see {log}")
    write_atomically(done, made_from)
    return True


def data_flags(start: Path) -> list[str]:
    """Flags with the prompts and the tokenizer of a warm start."""
    data = start / "data"
    names = {"prompts": "train.jsonl", "eval-prompts": "heldout.jsonl", "tokenizer-model": "tokenizer.model"}
    return [token for flag, name in names.items() for token in (f"--{flag}", str(data / name))]


def make_warm_start(start: Path):
    """Makes the quickstart's data/ and sft/ with the seed `START`. Raises RunFailed."""
    script, config = ROOT / "launch" / "warm_start.sh", CONFIGS / "quickstart_sft.yaml"
    variables = [f"SAVE={start}", f"SEED={START}", "CONFIG=quickstart"]
    command = ["env", *variables, "bash", str(script), "--target-eval-loss", START_LOSS]
    ensure(start / "sft", command, [str(script), str(config)])


def train(
    chosen: argparse.Namespace, start: Path, out: Path, recipe: str, seed: int, name: str, extra: list[str]
) -> Curve:
    """Runs a recipe with a seed, unless it is complete, and returns its curve. Raises RunFailed.

    `name`: of the variant, or of the recipe; `extra`: flags of the variant.
    """
    folder = out / name.replace(" ", "_") / f"seed{seed}"
    configs = [*chosen.config, str(CONFIGS / "recipes" / f"{recipe}.yaml")]
    steps = ["--train-iters", str(chosen.steps), "--lr-decay-iters", str(chosen.steps)] if chosen.steps else []
    flags = [*data_flags(start), "--pretrained-checkpoint", str(start / "sft"), "--seed", str(seed), *steps]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    program = [str(chosen.ranks), "-m", "megarl.train_rl", "--config", *configs, *flags, *extra, "--save", str(folder)]
    is_new = ensure(folder, [*torchrun, *program], configs)
    curve = read_curve(folder, name, seed, chosen.metrics)
    summary = f"{100 * curve.accuracy[0]:.1f} % -> {100 * curve.accuracy[-1]:.1f} % in {curve.steps[-1]} steps"
    print(f"{name} seed {seed}: {summary}{'' if is_new else ' (complete before)'}", flush=True)
    return curve


def train_all(chosen: argparse.Namespace, start: Path, out: Path) -> list[Curve]:
    """All runs, `--jobs` in parallel, seed by seed. If one fails, raises RunFailed after all have ended."""
    named = [(chosen.recipes[0], *variant) for variant in chosen.variants]
    named = named or [(recipe, recipe, []) for recipe in dict.fromkeys(chosen.recipes)]
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        runs = [
            pool.submit(train, chosen, start, out, recipe, seed, name, extra)
            for seed in dict.fromkeys(chosen.seeds) for recipe, name, extra in named
        ]  # fmt: skip
    return [run.result() for run in runs]


def read_curve(folder: Path, recipe: str, seed: int, metrics: list[str]) -> Curve:
    """The evaluations in a run's metrics, and the means of those `metrics` that it has. Raises UsageError if there are
    fewer than two evaluations."""
    rows = read_metrics(folder / FILE_NAME)
    generated = list(itertools.accumulate(row.get("rollout/tokens", 0) for row in rows))
    points = [(r["step"], r["eval/accuracy"], n) for r, n in zip(rows, generated, strict=True) if "eval/accuracy" in r]
    if len(points) < 2:
        raise UsageError(f"{folder / FILE_NAME} has {len(points)} evaluations; a curve needs two")
    late = rows[len(rows) // 2 :]
    values = {name: [row[name] for row in late if row.get(name) is not None] for name in metrics}
    means = {name: statistics.fmean(found) for name, found in values.items() if found}
    steps, accuracy, tokens = (list(column) for column in zip(*points, strict=True))
    return Curve(recipe, seed, steps, accuracy, tokens, metrics=means)


def read_runs(runs: list[tuple[str, Path]], metrics: list[str]) -> list[Curve]:
    """Curves of runs by name, with the seeds of their settings."""
    return [read_curve(folder, name, read_settings(folder)["megarl"]["seed"], metrics) for name, folder in runs]


def by_recipe(curves: list[Curve]) -> dict[str, list[Curve]]:
    """Curves by recipe in the given order, each sorted by seed."""
    grouped: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda curve: curve.seed):
        grouped.setdefault(curve.recipe, []).append(curve)
    return {recipe: grouped[recipe] for recipe in dict.fromkeys(curve.recipe for curve in curves)}


def table(curves: list[Curve]) -> str:
    """Markdown: a row per recipe, a column per seed with accuracy before, after, and the gain in points."""
    seeds = sorted({curve.seed for curve in curves})
    lines = [["run", *(f"seed {seed}" for seed in seeds), "smallest gain"], ["---"] * (len(seeds) + 2)]
    for recipe, of_seeds in by_recipe(curves).items():
        cells = {c.seed: f"{100 * c.accuracy[0]:.1f} → {100 * c.accuracy[-1]:.1f} ({c.gain:+.1f})" for c in of_seeds}
        smallest = min(curve.gain for curve in of_seeds)
        lines.append([recipe, *(cells.get(seed, "") for seed in seeds), f"{smallest:+.1f}"])
    return _markdown(lines)


def interval(values: list[float]) -> str:
    """Mean of paired differences, and its 95 % confidence interval by Student's t where there are two or more."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return f"{mean:+.1f}"
    half = T_95[min(count - 1, len(T_95)) - 1] * statistics.stdev(values) / count**0.5
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def paired_table(curves: list[Curve]) -> str:
    """Markdown: mean accuracy of each run's evaluations, their difference to the first name seed by seed as mean and
    95 % interval, and the metrics."""
    first, *_ = grouped = by_recipe(curves)
    base = {curve.seed: curve.mean for curve in grouped[first]}
    names = list(dict.fromkeys(name for curve in curves for name in curve.metrics))
    titles = ["run", "mean accuracy over the run", f"difference to {first} (95 % interval)", *names]
    lines = [titles, ["---"] * len(titles)]
    for name, of_seeds in grouped.items():
        differences = [curve.mean - base[curve.seed] for curve in of_seeds if curve.seed in base]
        found = ([curve.metrics[metric] for curve in of_seeds if metric in curve.metrics] for metric in names)
        means = [f"{statistics.fmean(values):.4g}" if values else "" for values in found]
        accuracy = statistics.fmean(curve.mean for curve in of_seeds)
        difference = interval(differences) if differences and name != first else ""
        lines.append([name, f"{accuracy:.1f} %", difference, *means])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(curves: list[Curve]) -> bytes:
    """A PNG: accuracy over steps and over generated tokens, or over steps in a panel for each group of names; a colour
    for each name, thin seeds, thick mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(curve.recipe.partition("/")[0] for curve in curves if "/" in curve.recipe))
    over_steps, over_tokens = ("steps", "step", 1), ("tokens", "thousand generated tokens", 1000)
    wanted = [(group, over_steps) for group in groups] or [(None, over_steps), (None, over_tokens)]
    figure = Figure(figsize=(13, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(wanted), sharey=True, squeeze=False)[0]
    for axes, (group, (name, title, unit)) in zip(panels, wanted, strict=True):
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(title, fontsize=12)
        axes.set_title(group or "", fontsize=12)
        drawn = {n: found for n, found in by_recipe(curves).items() if "/" not in n or n.startswith(f"{group}/")}
        for number, (recipe, of_seeds) in enumerate(drawn.items()):
            color = f"C{number}"
            lines = [([x / unit for x in getattr(c, name)], [100 * y for y in c.accuracy]) for c in of_seeds]
            for x, y in lines:
                axes.plot(x, y, color=color, lw=0.8, alpha=0.45)
            label = recipe.rpartition("/")[2]
            axes.plot(*(_means(column) for column in zip(*lines, strict=True)), color=color, lw=2.6, label=label)
    panels[0].set_ylabel("held-out accuracy, %", fontsize=12)
    panels[0].legend(fontsize=11, frameon=False, loc="best")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _means(rows: tuple[list[float], ...]) -> list[float]:
    """Means of the columns, up to the shortest row."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=False)]


def report(curves: list[Curve], out: Path, chosen: argparse.Namespace) -> int:
    """Writes figure and numbers, prints the tables. Returns the exit status. Raises UsageError for a metric that no run
    has."""
    for name in chosen.metrics:
        if not any(name in curve.metrics for curve in curves):
            raise UsageError(f"--metrics {name}: no run has it in its second half")
    min_gain = chosen.min_gain
    write_atomically(out / "curves.png", draw(curves))
    lines = ",\n".join(json.dumps(curve._asdict()) for curve in curves)
    write_atomically(out / "curves.json", f"[\n{lines}\n]\n")
    print(f"\n{table(curves)}\n")
    if len(by_recipe(curves)) > 1:
        print(f"{paired_table(curves)}\n")
    print(f"{out / 'curves.png'}, {out / 'curves.json'}")
    worst = min(curves, key=lambda curve: curve.gain)
    if worst.gain < min_gain:
        text = f"{worst.recipe} seed {worst.seed} gained {worst.gain:.1f} points, fewer than --min-gain {min_gain:g}"
        print(f"curves: {text}", file=sys.stderr)
        return 1
    return 0


@refuses_in_one_line("curves")
def main(argv: list[str]) -> int:
    try:
        chosen = parse_arguments(argv)
        out = Path(chosen.out).absolute()
        out.mkdir(parents=True, exist_ok=True)
        if chosen.runs:
            return report(read_runs(chosen.runs, chosen.metrics), out, chosen)
        start = Path(chosen.warm_start).absolute() if chosen.warm_start else out
        if not chosen.warm_start:
            make_warm_start(start)
        return report(train_all(chosen, start, out), out, chosen)
    except OSError as error:
        print(f"curves: --out {chosen.out}: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"curves: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
