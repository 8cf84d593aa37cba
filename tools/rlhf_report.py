"""Draws the three stages of launch/rlhf_pipeline.sh in one figure and prints a table.

    python tools/rlhf_report.py runs/rlhf --min-accuracy 0.9 --max-kl 5

Reads metrics.jsonl of the runs sft/, reward/ and ppo/ in the folder and the samples of ppo/; writes report.png there.
"before" is the evaluation before the first PPO step, "after" the one after the last.
Exit status: 0; 1 if the reward model ranks fewer held-out pairs correctly than `--min-accuracy`, or PPO did not raise
the model's reward, the true score and the exact answers on held-out prompts, or the KL of a step was above `--max-kl`;
2: wrong use.
"""

import argparse
import io
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing
from megarl.extras.report_figure import GREY, legend, line, not_recorded, set_title, start_at_zero
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME, read_metrics, series
from megarl.plain_files import parse_record, read_records, reading

STAGES = ("sft", "reward", "ppo")
ACCURACY, MODEL, TRUE, EXACT = "eval/accuracy", "eval/reward/model", "eval/reward/reasoning-gym", "eval/accuracy"
KL = "kl/reference"
BLUE, ORANGE, GREEN, PURPLE, RED = "tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red"


class Row(NamedTuple):
    """A line of the table; `before` is None without an earlier value."""

    name: str
    before: float | None
    after: float
    limit: str
    is_kept: bool


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked. Raises UsageError."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="DIR", help="SAVE of launch/rlhf_pipeline.sh")
    parser.add_argument(
        "--min-accuracy", type=float, required=True, help="minimum fraction of held-out pairs ranked correctly"
    )
    parser.add_argument("--max-kl", type=float, required=True, help="maximum KL per response in any PPO step")
    return parser.parse_args(argv)


def ends(rows: list[dict], name: str) -> tuple[float, float]:
    """First and last value of a metric. Raises UsageError if there are fewer than two."""
    _, values = series(rows, name)
    if len(values) < 2:
        raise UsageError(f"the metrics have {len(values)} values of {name}; the report needs the first and the last")
    return values[0], values[-1]


def rows_of(runs: dict[str, list[dict]], min_accuracy: float, max_kl: float) -> list[Row]:
    """The rows of the table. Raises UsageError if a metric is missing."""
    first, accuracy = ends(runs["reward"], ACCURACY)
    pairs = f"at least {min_accuracy:g}"
    found = [Row("reward model: held-out pairs in order", first, accuracy, pairs, accuracy >= min_accuracy)]
    names = {"model's reward": MODEL, "true score": TRUE, "exact answers": EXACT}
    for name, metric in names.items():
        before, after = ends(runs["ppo"], metric)
        found.append(Row(f"PPO: {name}, held-out prompts", before, after, "rises", after > before))
    _, kl = series(runs["ppo"], KL)
    if not kl:
        raise UsageError(f"the metrics have no value of {KL}")
    found.append(Row("PPO: KL per response, last step", None, kl[-1], "", True))
    found.append(Row("PPO: KL per response, largest", None, max(kl), f"at most {max_kl:g}", max(kl) <= max_kl))
    return found


def table(rows: list[Row]) -> str:
    """The rows as text in columns."""
    lines = [("", "before", "after", "limit", "")]
    for row in rows:
        before = "" if row.before is None else f"{row.before:.3f}"
        lines.append((row.name, before, f"{row.after:.3f}", row.limit, "" if row.is_kept else "MISSED"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<>><<"
    texts = ("  ".join(f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def by_true_score(path: Path) -> list[tuple[float, float]]:
    """[(true score rounded to tenths, mean of the model's reward)] of the responses in a samples file."""
    found = defaultdict(list)
    with reading(str(path), "holds no rewards of samples"):
        for row in read_records(path):
            values = (parse_record(row) or {})["reward_values"]
            found[round(values["reasoning-gym"], 1)].append(values["model"])
    return [(score, fmean(found[score])) for score in sorted(found)]


def draw(runs: dict[str, list[dict]], samples: list[Path], min_accuracy: float, max_kl: float) -> bytes:
    """A PNG (1650 x 990 pixels) of all stages, with the model's reward by true score.

    `samples`: samples files of the PPO steps, in order; the first and the last are shown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    spaces: Any = figure.get_layout_engine()
    spaces.set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    (loss, pairs, reward), (true, kl, sound) = figure.subplots(2, 3)
    for axes in (loss, pairs, reward, true, kl, sound):
        axes.grid(True, alpha=0.3)
        axes.tick_params(labelsize=11)
        axes.set_xlabel("step", fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
    both = {"training": "sft/loss", "held-out": "eval/loss"}
    _curves(loss, runs["sft"], "1 · Fine-tuning: loss", both)
    start_at_zero(loss)
    _curves(pairs, runs["reward"], "2 · Reward model: held-out pairs in order", {"accuracy": ACCURACY})
    _limit(pairs, min_accuracy)
    _curves(reward, runs["ppo"], "3 · Model's reward", {"training": "reward/model/mean", "held-out": MODEL})
    _curves(true, runs["ppo"], "3 · True score", {"partial credit": TRUE, "exact": EXACT})
    true.set_ylim(0, 1.02)
    _curves(kl, runs["ppo"], "3 · KL to the fine-tuned policy, per response", {"KL": KL}, PURPLE)
    _limit(kl, max_kl)
    start_at_zero(kl)
    _soundness(sound, samples)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curves(axes, rows: list[dict], title: str, curves: dict[str, str], *colors: str) -> None:
    set_title(axes, title)
    present = {label: name for label, name in curves.items() if series(rows, name)[0]}
    if not present:
        return not_recorded(axes)
    chosen = zip(present.items(), colors or (BLUE, GREEN), strict=False)
    lines = [line(axes, rows, name, color, label) for (label, name), color in chosen]
    if len(lines) > 1:
        legend(axes, lines)


def _limit(axes, value: float) -> None:
    axes.axhline(value, color=GREY, linestyle="--", linewidth=1.2)


def _soundness(axes, samples: list[Path]) -> None:
    """Mean reward by true score: it should rise, and not drift while PPO optimizes it."""
    set_title(axes, "Reward by true score")
    axes.set_xlabel("true score", fontsize=12)
    if not samples:
        return not_recorded(axes)
    lines = []
    for path, color in {samples[0]: ORANGE, samples[-1]: RED}.items():
        scores, means = zip(*by_true_score(path), strict=True)
        label = f"step {int(path.stem.removeprefix('step_'))}"
        lines += axes.plot(scores, means, "o-", color=color, label=label, linewidth=1.8, markersize=5)
    legend(axes, lines)


@refuses_in_one_line("rlhf_report")
def main(argv: list[str]) -> int:
    chosen = parse_arguments(argv)
    with writing(f"{chosen.folder}"):
        runs = {name: read_metrics(chosen.folder / name / FILE_NAME) for name in STAGES}
        found = rows_of(runs, chosen.min_accuracy, chosen.max_kl)
        samples = sorted((chosen.folder / "ppo" / "samples").glob("step_*.jsonl"))
        write_atomically(chosen.folder / "report.png", draw(runs, samples, chosen.min_accuracy, chosen.max_kl))
    print(f"{table(found)}\n\n{chosen.folder / 'report.png'}")
    return 0 if all(row.is_kept for row in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
