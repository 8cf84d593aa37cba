"""The figure of a run's report: panels drawn from metrics.jsonl; those of a MoE policy show expert load and replay."""

import functools
import io
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import floor, log10
from typing import Any

from megarl.observe.metrics_file import series

GREY = "0.45"
REWARD, ACCURACY, KL, LENGTH = "tab:blue", "tab:green", "tab:purple", "tab:brown"
ACTOR, CRITIC, GAP = "tab:blue", "tab:orange", "tab:red"
LOAD, DISAGREEMENT, REPLAYED, LIVE = "tab:olive", "tab:red", "tab:green", "tab:red"
TERM = re.compile("reward/(.+)/mean")  # score of a term of --reward, without its weight
TERMS = ("tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")


def draw_report(rows: list[dict], title: str) -> bytes:
    """A PNG (1650 x 990 pixels; 1650 x 1485 of a MoE policy) of these rows of metrics.jsonl."""
    # Importing matplotlib takes 0.5 s, so only a report pays for it. Figure, unlike pyplot, needs no display and no
    # process-wide state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ticks = _tick_formatter()
    panels = _panels(rows)
    figure = Figure(figsize=(15, 4.5 * len(panels) / 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    spaces: Any = figure.get_layout_engine()
    spaces.set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    figure.suptitle(title, fontsize=16, fontweight="bold")
    grid = figure.subplots(len(panels) // 3, 3)
    last_step = max([row["step"] for row in rows], default=0)
    for axes, (text, names, draw) in zip(grid.flat, panels, strict=True):
        axes.grid(True, alpha=0.3)
        axes.tick_params(labelsize=11)
        axes.set_xlabel("step", fontsize=12)
        # Five numbers of seven digits fit beside each other.
        axes.xaxis.get_major_locator().set_params(integer=True, nbins="auto" if last_step < 10_000 else 5)
        axes.xaxis.set_major_formatter(ticks())
        axes.yaxis.set_major_formatter(ticks())
        axes.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1))
        axes.spines[["top", "right"]].set_visible(False)
        set_title(axes, text)
        if any(series(rows, name)[0] for name in names):
            draw(axes, rows)
        else:
            not_recorded(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _write_across(axes, text: str, **place: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=13, color=GREY, **place)


# A panel of the figure: its title, its metrics, without any of which it says so, and what draws it.
Panel = tuple[str, Sequence[str], Callable[[Any, list[dict]], None]]


def _reward(axes, rows: list[dict]) -> None:
    both = [row for row in rows if row.get("reward/mean") is not None and row.get("reward/std") is not None]
    low, high = ([row["reward/mean"] + sign * row["reward/std"] for row in both] for sign in (-1, 1))
    axes.fill_between([row["step"] for row in both], low, high, color=REWARD, alpha=0.15, linewidth=0)
    lines = [line(axes, rows, "reward/mean", REWARD, "reward")]
    terms = sorted({(name, match[1]) for row in rows for name in row if (match := TERM.fullmatch(name))})
    for (name, term), color in zip(terms, TERMS, strict=False) if len(terms) > 1 else ():
        lines.append(line(axes, rows, name, color, term, "--"))
    if len(lines) > 1:
        legend(axes, lines)


def _accuracy(axes, rows: list[dict]) -> None:
    steps, values = series(rows, "eval/accuracy")
    axes.plot(steps, values, "o-", color=ACCURACY, linewidth=1.8, markersize=5)
    # Accuracy is in [0, 1]; the margin keeps points and labels at the limits visible.
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    _value_label(axes, steps[0], values[0], "left", above=len(values) > 1 and values[1] < values[0])
    if len(values) > 1:
        _value_label(axes, steps[-1], values[-1], "right", above=values[-1] >= values[-2])


def _value_label(axes, step: int, value: float, side: str, above: bool) -> None:
    place = dict(xytext=(0, 9 if above else -9), textcoords="offset points", ha=side, va="bottom" if above else "top")
    axes.annotate(f"{value:.3f}", (step, value), fontsize=12, fontweight="bold", color=ACCURACY, **place)


def _kl(axes, rows: list[dict]) -> None:
    lines = [line(axes, rows, "kl/reference", KL, "KL")]
    if series(rows, "kl/coefficient")[0]:
        lines.append(_on_the_right(axes, rows, "kl/coefficient", "coefficient", "coefficient"))
    start_at_zero(axes)
    legend(axes, lines)


def _kl_to_teacher(axes, rows: list[dict]) -> None:
    reverse, forward = ("distill/reverse_kl", KL), ("distill/forward_kl", CRITIC)
    _present(axes, rows, [(*reverse, "policy to teacher"), (*forward, "teacher to policy")])
    start_at_zero(axes)


def _on_the_right(axes, rows: list[dict], name: str, label: str, of_axis: str):
    right = axes.twinx()
    right.yaxis.set_major_formatter(_tick_formatter()())
    right.spines["top"].set_visible(False)
    right.tick_params(labelsize=11, colors=GREY)
    right.set_ylabel(of_axis, fontsize=12, color=GREY)
    curve = line(right, rows, name, GREY, label, "--")
    start_at_zero(right)
    return curve


def _length(axes, rows: list[dict]) -> None:
    line(axes, rows, "rollout/response_length_mean", LENGTH)
    start_at_zero(axes)


def _present(axes, rows: list[dict], curves: Sequence[tuple]) -> None:
    legend(axes, [line(axes, rows, *curve) for curve in curves if series(rows, curve[0])[0]])


def _gap(axes, rows: list[dict]) -> None:
    """Largest gap on a log scale that ends in a linear part: zero, the best value, has no logarithm."""
    steps, values = series(rows, "rollout/logprob_gap_max")
    # Points, not a line: the gap jumps between zero and rounding errors, so a line would fill the panel.
    axes.plot(steps, values, "o", color=GAP, markersize=3.5)
    if any(values):
        smallest_power = 10.0 ** floor(log10(min(value for value in values if value > 0)))
        axes.set_yscale("symlog", linthresh=smallest_power)
        axes.set_ylim(-0.3 * smallest_power, 4 * max(values))
    else:
        axes.set_ylim(-0.5, 1)
        axes.set_yticks([0], ["0"])
        _write_across(axes, "exactly 0 at every step")
    if any(series(rows, "rollout/staleness")[1]):  # the gap of stale tokens is that of older policies
        _on_the_right(axes, rows, "rollout/staleness", "staleness", "staleness, updates")


def _by_layer(axes, rows: list[dict], name: str, color: str) -> None:
    thin = [line(axes, rows, layer, GREY, "one layer") for layer in _layers_of(rows, name)]
    for curve in thin:
        curve.set(linewidth=0.8, alpha=0.5)
    legend(axes, [line(axes, rows, name, color, "all layers"), thin[0]])
    start_at_zero(axes)


def _layers_of(rows: list[dict], name: str) -> list[str]:
    pattern = re.compile(re.escape(name) + r"/layer_\d+")
    return sorted({key for row in rows for key in row if pattern.fullmatch(key)})


def _router_gaps(axes, rows: list[dict]) -> None:
    _present(axes, rows, [("router/gap_replayed", REPLAYED, "replayed"), ("router/gap_live", LIVE, "live", "--")])
    axes.set_yscale("symlog", linthresh=1e-7)  # zero, the best value, has no logarithm
    axes.set_ylim(bottom=0)


LOSSES = [("actor/loss", ACTOR, "actor"), ("critic/loss", CRITIC, "critic"), ("sft/loss", ACTOR, "training")]
LOSSES += [("reward/loss", ACTOR, "training"), ("eval/loss", CRITIC, "held out")]


def _panels(rows: list[dict]) -> list[Panel]:
    kl: Panel = ("KL to reference", ["kl/reference"], _kl)
    if not series(rows, "kl/reference")[0] and series(rows, "distill/reverse_kl")[0]:
        kl = ("KL to teacher (nats per token)", ["distill/reverse_kl"], _kl_to_teacher)
    found: list[Panel] = [
        ("Reward (mean ± standard deviation)", ["reward/mean"], _reward),
        ("Held-out accuracy", ["eval/accuracy"], _accuracy),
        kl,
        ("Response length (mean, tokens)", ["rollout/response_length_mean"], _length),
        ("Losses", [name for name, *_ in LOSSES], functools.partial(_present, curves=LOSSES)),
        ("Log-prob gap: max |rollout − recomputed|", ["rollout/logprob_gap_max"], _gap),
    ]
    if not any("router/load_imbalance" in row for row in rows):
        return found
    # Load of the busiest expert above the mean (0 is balanced); replayed tokens whose live router selects others.
    layered = ("Load imbalance", "router/load_imbalance", LOAD), ("Disagreement", "router/disagreement", DISAGREEMENT)
    for title, name, color in layered:
        draw = functools.partial(_by_layer, name=name, color=color)
        found.append((title, _layers_of(rows, name), draw))
    return [*found, ("Mean log-prob gap", ["router/gap_replayed", "router/gap_live"], _router_gaps)]


# -- ticks ----------------------------------------------------------------------------------------------------------


def tick_texts(values: Sequence[float]) -> list[str]:
    """Texts of the ticks of a linear axis, with the digits that their distance needs, so that no two are the same.

    matplotlib's are relative to an offset in a corner. Below 0.001 and from ten million on they have an exponent.
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
    _write_across(axes, "not recorded", va="center")
    axes.set_yticks([])


def line(axes, rows: list[dict], name: str, color: str, label: str | None = None, style: str = "-"):
    """A single point gets a marker, because its line would be invisible."""
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
    """Next to the title, where it covers no curve."""
    spaces = dict(borderaxespad=0.3, columnspacing=1.2, handlelength=1.6)
    place = dict(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    axes.legend(handles=lines, fontsize=11, frameon=False, **place, **spaces)
