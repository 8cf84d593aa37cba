"""The figure of a run's report: panels drawn from metrics.jsonl; those of a MoE policy show expert load and replay."""

import io
import re
from collections.abc import Sequence
from itertools import pairwise
from math import floor, log10
from typing import Any

from megarl.observe.metrics_file import series

GREY = "0.45"
REWARD, ACCURACY, KL, LENGTH, ACTOR, CRITIC, GAP = (
    "tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:blue", "tab:orange", "tab:red"
)  # fmt: skip
LOAD, DISAGREEMENT, REPLAYED, LIVE = "tab:olive", "tab:red", "tab:green", "tab:red"
TERM = re.compile("reward/(.+)/mean")  # score of a term of --reward, without its weight
TERMS = ("tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")


def draw_report(rows: list[dict], title: str) -> bytes:
    """A PNG (1650 x 990 pixels) of reward, held-out accuracy, KL, response length, losses and log-prob gap.

    A MoE policy adds a row (1650 x 1485) on expert load and router replay.

    rows  lines of metrics.jsonl from `read_metrics`. A panel without its metric says "not recorded".
    """
    # Importing matplotlib takes 0.5 s, so only a report pays for it. Figure, unlike pyplot, needs no display and no
    # process-wide state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ticks = _tick_formatter()
    panels = [_reward, _accuracy, _kl, _length, _losses, _gap]
    panels += EXPERT_PANELS if has_experts(rows) else ()
    figure = Figure(figsize=(15, 4.5 * len(panels) / 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    spaces: Any = figure.get_layout_engine()
    spaces.set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    figure.suptitle(title, fontsize=16, fontweight="bold")
    grid = figure.subplots(len(panels) // 3, 3)
    last_step = max([row["step"] for row in rows], default=0)
    for axes, draw in zip(grid.flat, panels, strict=True):
        axes.grid(True, alpha=0.3)
        axes.tick_params(labelsize=11)
        axes.set_xlabel("step", fontsize=12)
        # Five numbers of seven digits fit beside each other.
        axes.xaxis.get_major_locator().set_params(integer=True, nbins="auto" if last_step < 10_000 else 5)
        axes.xaxis.set_major_formatter(ticks())
        axes.yaxis.set_major_formatter(ticks())
        axes.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1))
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _reward(axes, rows: list[dict]) -> None:
    set_title(axes, "Reward (mean ± standard deviation)")
    steps, _ = series(rows, "reward/mean")
    if not steps:
        return not_recorded(axes)
    both = [row for row in rows if row.get("reward/mean") is not None and row.get("reward/std") is not None]
    axes.fill_between(
        [row["step"] for row in both],
        [row["reward/mean"] - row["reward/std"] for row in both],
        [row["reward/mean"] + row["reward/std"] for row in both],
        color=REWARD, alpha=0.15, linewidth=0,
    )  # fmt: skip
    lines = [line(axes, rows, "reward/mean", REWARD, "reward")]
    terms = sorted({name for row in rows for name in row if TERM.fullmatch(name)})
    for name, color in zip(terms, TERMS, strict=False) if len(terms) > 1 else ():
        lines.append(line(axes, rows, name, color, TERM.fullmatch(name)[1], "--"))
    if len(lines) > 1:
        legend(axes, lines)


def _accuracy(axes, rows: list[dict]) -> None:
    set_title(axes, "Held-out accuracy")
    steps, values = series(rows, "eval/accuracy")
    if not steps:
        return not_recorded(axes)
    axes.plot(steps, values, "o-", color=ACCURACY, linewidth=1.8, markersize=5)
    # Accuracy is in [0, 1]; the margin keeps points and labels at the limits visible.
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    _value_label(axes, steps[0], values[0], "left", above=len(values) > 1 and values[1] < values[0])
    if len(values) > 1:
        _value_label(axes, steps[-1], values[-1], "right", above=values[-1] >= values[-2])


def _value_label(axes, step: int, value: float, side: str, above: bool) -> None:
    """Write a point's value above or below it, away from the curve."""
    axes.annotate(
        f"{value:.3f}", (step, value), xytext=(0, 9 if above else -9), textcoords="offset points",
        ha=side, va="bottom" if above else "top", fontsize=12, fontweight="bold", color=ACCURACY,
    )  # fmt: skip


def _kl(axes, rows: list[dict]) -> None:
    if not series(rows, "kl/reference")[0] and series(rows, "distill/reverse_kl")[0]:
        return _kl_to_teacher(axes, rows)
    set_title(axes, "KL to reference")
    if not series(rows, "kl/reference")[0]:
        return not_recorded(axes)
    lines = [line(axes, rows, "kl/reference", KL, "KL")]
    if series(rows, "kl/coefficient")[0]:
        right = _right_axes(axes, "coefficient")
        lines.append(line(right, rows, "kl/coefficient", GREY, "coefficient", "--"))
        start_at_zero(right)
    start_at_zero(axes)
    legend(axes, lines)


def _kl_to_teacher(axes, rows: list[dict]) -> None:
    set_title(axes, "KL to teacher (nats per token)")
    names = {"distill/reverse_kl": ("policy to teacher", KL), "distill/forward_kl": ("teacher to policy", CRITIC)}
    found = {name: style for name, style in names.items() if series(rows, name)[0]}
    lines = [line(axes, rows, name, color, label) for name, (label, color) in found.items()]
    start_at_zero(axes)
    legend(axes, lines)


def _right_axes(axes, label: str):
    """Axes with a grey scale of their own on the right."""
    right = axes.twinx()
    right.yaxis.set_major_formatter(_tick_formatter()())
    right.spines["top"].set_visible(False)
    right.tick_params(labelsize=11, colors=GREY)
    right.set_ylabel(label, fontsize=12, color=GREY)
    return right


def _length(axes, rows: list[dict]) -> None:
    set_title(axes, "Response length (mean, tokens)")
    if not series(rows, "rollout/response_length_mean")[0]:
        return not_recorded(axes)
    line(axes, rows, "rollout/response_length_mean", LENGTH)
    start_at_zero(axes)


def _losses(axes, rows: list[dict]) -> None:
    set_title(axes, "Losses")
    curves = [
        ("actor", "actor/loss", ACTOR), ("critic", "critic/loss", CRITIC), ("training", "sft/loss", ACTOR),
        ("training", "reward/loss", ACTOR), ("held out", "eval/loss", CRITIC),
    ]  # fmt: skip
    present = [curve for curve in curves if series(rows, curve[1])[0]]
    if not present:
        return not_recorded(axes)
    legend(axes, [line(axes, rows, name, color, label) for label, name, color in present])


def _gap(axes, rows: list[dict]) -> None:
    """Largest gap on a log scale that ends in a linear part: zero, the best value, has no logarithm."""
    set_title(axes, "Log-prob gap: max |rollout − recomputed|")
    steps, values = series(rows, "rollout/logprob_gap_max")
    if not steps:
        return not_recorded(axes)
    # Points, not a line: the gap jumps between zero and rounding errors, so a line would fill the panel.
    axes.plot(steps, values, "o", color=GAP, markersize=3.5)
    if any(values):
        smallest_power = 10.0 ** floor(log10(min(value for value in values if value > 0)))
        axes.set_yscale("symlog", linthresh=smallest_power)
        axes.set_ylim(-0.3 * smallest_power, 4 * max(values))
    else:
        axes.set_ylim(-0.5, 1)
        axes.set_yticks([0], ["0"])
        axes.text(0.5, 0.5, "exactly 0 at every step", transform=axes.transAxes, ha="center", fontsize=13, color=GREY)
    if any(series(rows, "rollout/staleness")[1]):
        _staleness(axes, rows)
    return None


def _staleness(axes, rows: list[dict]) -> None:
    """The gap is that of older policies where tokens are stale."""
    right = _right_axes(axes, "staleness, updates")
    line(right, rows, "rollout/staleness", GREY, "staleness", "--")
    start_at_zero(right)


# -- a MoE policy: expert load, router disagreement, log-prob gap with and without router replay --------------------


def has_experts(rows: list[dict]) -> bool:
    """Whether the run's policy is a MoE model."""
    return any("router/load_imbalance" in row for row in rows)


def layers_of(rows: list[dict], name: str) -> list[str]:
    """Names of a metric's per-layer values, in order of the layers."""
    pattern = re.compile(re.escape(name) + r"/layer_\d+")
    return sorted({key for row in rows for key in row if pattern.fullmatch(key)})


def _by_layer(axes, rows: list[dict], name: str, color: str) -> None:
    """Draw the mean over the layers, and each layer in grey."""
    layers = layers_of(rows, name)
    if not layers:
        return not_recorded(axes)
    thin = [line(axes, rows, layer, GREY, "one layer") for layer in layers]
    for curve in thin:
        curve.set(linewidth=0.8, alpha=0.5)
    legend(axes, [line(axes, rows, name, color, "all layers"), thin[0]])
    start_at_zero(axes)


def _load(axes, rows: list[dict]) -> None:
    """Load of the busiest expert above the mean; 0 is balanced."""
    set_title(axes, "Load imbalance")
    _by_layer(axes, rows, "router/load_imbalance", LOAD)


def _disagreement(axes, rows: list[dict]) -> None:
    """Fraction of replayed tokens for which the live router selects other experts."""
    set_title(axes, "Disagreement")
    _by_layer(axes, rows, "router/disagreement", DISAGREEMENT)


def _router_gaps(axes, rows: list[dict]) -> None:
    """Mean log-prob gap on probe batches, with and without the rollout's routes."""
    set_title(axes, "Mean log-prob gap")
    curves = [("replayed", "router/gap_replayed", REPLAYED, "-"), ("live", "router/gap_live", LIVE, "--")]
    present = [curve for curve in curves if series(rows, curve[1])[0]]
    if not present:
        return not_recorded(axes)
    legend(axes, [line(axes, rows, name, color, label, style) for label, name, color, style in present])
    axes.set_yscale("symlog", linthresh=1e-7)  # zero, the best value, has no logarithm
    axes.set_ylim(bottom=0)


EXPERT_PANELS = (_load, _disagreement, _router_gaps)


# -- ticks ----------------------------------------------------------------------------------------------------------


def tick_texts(values: Sequence[float]) -> list[str]:
    """Texts of the ticks of a linear axis, with the digits that their distance needs, so that no two are the same.

    Numbers are written out, unlike matplotlib's, which are relative to an offset in a corner of the panel; below 0.001
    and from ten million on they have an exponent.
    """
    size = max(map(abs, values), default=0.0)
    gaps = [abs(b - a) for a, b in pairwise(values)]
    error = min(gaps) / 100 if gaps else size / 1e4
    kind = "e" if size < 1e-3 or size >= 1e7 else "f"
    fits = (n for n in range(16) if all(abs(float(f"{value:.{n}{kind}}") - value) <= error for value in values))
    digits = next(fits, 16)
    texts = ["0" if abs(value) <= error else f"{value:,.{digits}{kind}}" for value in values]
    return [re.sub(r"e([+-])0*(\d+)", lambda m: f"e{m[1].strip('+')}{m[2]}", text) for text in texts]


def _tick_formatter():
    """The class of `tick_texts` for an axis."""
    from matplotlib.ticker import Formatter

    class TickTexts(Formatter):
        def __call__(self, x, pos=None):
            return tick_texts([x])[0]

        def format_ticks(self, values):
            return [text.replace("-", "−") for text in tick_texts(values)]

    return TickTexts


# -- the look of all panels -------------------------------------------------------------------------------------------


def set_title(axes, text: str) -> None:
    axes.set_title(text, fontsize=13, loc="left", pad=10)


def not_recorded(axes) -> None:
    """Mark a panel whose metric the run does not have."""
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", fontsize=13, color=GREY)
    axes.set_yticks([])


def line(axes, rows: list[dict], name: str, color: str, label: str | None = None, style: str = "-"):
    """Draw one metric; a single point gets a marker, because its line would be invisible."""
    steps, values = series(rows, name)
    marker = "o" if len(steps) == 1 else None
    return axes.plot(steps, values, style, color=color, label=label, linewidth=1.8, marker=marker)[0]


def start_at_zero(axes) -> None:
    """Start the axis at zero if no value is below it, so that small changes do not look large."""
    low, high = axes.get_ylim()
    data_low, data_high = axes.dataLim.intervaly
    if data_low >= 0:
        axes.set_ylim(0, data_high * 1.12 if data_high > 0 else 1)
    else:
        axes.set_ylim(low, high)


def legend(axes, lines: list) -> None:
    """Put the legend next to the title, where it covers no curve."""
    axes.legend(
        handles=lines, fontsize=11, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False,
        borderaxespad=0.3, columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip
