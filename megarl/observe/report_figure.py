"""The figure of a run's report: six panels drawn from the lines of metrics.jsonl."""

import io
from math import ceil, floor, log10

REWARD, ACCURACY, KL, LENGTH, ACTOR, CRITIC, GAP = (
    "tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:blue", "tab:orange", "tab:red"
)  # fmt: skip
GREY = "0.45"


def draw_report(rows: list[dict], title: str) -> bytes:
    """A PNG (1650 x 990 pixels) of reward, held-out accuracy, KL, response length, losses and log-prob gap.

    rows  lines of metrics.jsonl, as `read_metrics` gives them. A panel without its metric says "not recorded".
    """
    # matplotlib takes half a second to import, so only a report pays for it; Figure alone needs no display and no
    # process-wide state, as pyplot would.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    figure.suptitle(title, fontsize=16, fontweight="bold")
    panels = figure.subplots(2, 3)
    last_step = max([row["step"] for row in rows], default=0)
    for axes, draw in zip(panels.flat, (_reward, _accuracy, _kl, _length, _losses, _gap)):
        axes.grid(True, alpha=0.3)
        axes.tick_params(labelsize=11)
        axes.set_xlabel("step", fontsize=12)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1))
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def series(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, without the steps at which it is missing or was not finite."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _title(axes, text: str) -> None:
    axes.set_title(text, fontsize=13, loc="left", pad=10)


def _not_recorded(axes) -> None:
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", fontsize=13, color=GREY)
    axes.set_yticks([])


def _line(axes, rows: list[dict], name: str, color: str, label: str | None = None, style: str = "-"):
    """Draw one metric; a single point gets a marker, since a line of it would not show."""
    steps, values = series(rows, name)
    marker = "o" if len(steps) == 1 else None
    return axes.plot(steps, values, style, color=color, label=label, linewidth=1.8, marker=marker)[0]


def _reward(axes, rows: list[dict]) -> None:
    _title(axes, "Reward (mean ± standard deviation)")
    steps, _ = series(rows, "reward/mean")
    if not steps:
        return _not_recorded(axes)
    both = [row for row in rows if row.get("reward/mean") is not None and row.get("reward/std") is not None]
    axes.fill_between(
        [row["step"] for row in both],
        [row["reward/mean"] - row["reward/std"] for row in both],
        [row["reward/mean"] + row["reward/std"] for row in both],
        color=REWARD, alpha=0.15, linewidth=0,
    )  # fmt: skip
    _line(axes, rows, "reward/mean", REWARD)


def _accuracy(axes, rows: list[dict]) -> None:
    _title(axes, "Held-out accuracy")
    steps, values = series(rows, "eval/accuracy")
    if not steps:
        return _not_recorded(axes)
    axes.plot(steps, values, "o-", color=ACCURACY, linewidth=1.8, markersize=5)
    # Accuracy lies in [0, 1]; the room around it keeps points and labels at the borders whole.
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    _value_label(axes, steps[0], values[0], "left", above=len(values) > 1 and values[1] < values[0])
    if len(values) > 1:
        _value_label(axes, steps[-1], values[-1], "right", above=values[-1] >= values[-2])


def _value_label(axes, step: int, value: float, side: str, above: bool) -> None:
    """Write a point's value next to it, on the side to which the curve does not go."""
    axes.annotate(
        f"{value:.3f}", (step, value), xytext=(0, 9 if above else -9), textcoords="offset points",
        ha=side, va="bottom" if above else "top", fontsize=12, fontweight="bold", color=ACCURACY,
    )  # fmt: skip


def _kl(axes, rows: list[dict]) -> None:
    _title(axes, "KL to reference")
    if not series(rows, "kl/reference")[0]:
        return _not_recorded(axes)
    lines = [_line(axes, rows, "kl/reference", KL, "KL")]
    if series(rows, "kl/coefficient")[0]:
        right = axes.twinx()
        right.spines["top"].set_visible(False)
        right.tick_params(labelsize=11, colors=GREY)
        right.set_ylabel("coefficient", fontsize=12, color=GREY)
        lines.append(_line(right, rows, "kl/coefficient", GREY, "coefficient", "--"))
        _from_zero(right)
    _from_zero(axes)
    _legend(axes, lines)


def _length(axes, rows: list[dict]) -> None:
    _title(axes, "Response length (mean, tokens)")
    if not series(rows, "rollout/response_length_mean")[0]:
        return _not_recorded(axes)
    _line(axes, rows, "rollout/response_length_mean", LENGTH)
    _from_zero(axes)


def _losses(axes, rows: list[dict]) -> None:
    _title(axes, "Losses")
    curves = [("actor", "actor/loss", ACTOR), ("critic", "critic/loss", CRITIC)]
    present = [curve for curve in curves if series(rows, curve[1])[0]]
    if not present:
        return _not_recorded(axes)
    _legend(axes, [_line(axes, rows, name, color, label) for label, name, color in present])


def _gap(axes, rows: list[dict]) -> None:
    """Largest gap on a log scale. Zero, the best value, has no logarithm: it gets a row of its own at the bottom."""
    _title(axes, "Log-prob gap: max |rollout − recomputed|")
    steps, values = series(rows, "rollout/logprob_gap_max")
    if not steps:
        return _not_recorded(axes)
    positive = [value for value in values if value > 0]
    if not positive:
        axes.plot(steps, values, "o", color=GAP, markersize=3.5)
        axes.set_ylim(-0.5, 1)
        axes.set_yticks([0], ["0"])
        axes.text(0.5, 0.5, "exactly 0 at every step", transform=axes.transAxes, ha="center", fontsize=13, color=GREY)
        return
    low, high = min(positive) / 4, max(positive) * 4  # 16 times apart at least, so a power of ten lies between
    zero_row = low / (high / low) ** 0.1
    axes.set_yscale("log")
    # Points, not a line: a gap jumps between zero and a rounding error, and a line would paint the panel full.
    axes.plot(steps, [value or zero_row for value in values], "o", color=GAP, markersize=3.5)
    first, last = ceil(log10(low)), floor(log10(high))
    exponents = range(first, last + 1, (last - first) // 8 + 1)
    ticks, labels = [10.0**exponent for exponent in exponents], [f"$10^{{{exponent}}}$" for exponent in exponents]
    if len(positive) < len(values):
        axes.set_ylim(zero_row / (high / low) ** 0.05, high)
        ticks, labels = [zero_row, *ticks], ["0", *labels]
    else:
        axes.set_ylim(low, high)
    axes.set_yticks(ticks, labels)
    axes.minorticks_off()


def _from_zero(axes) -> None:
    """Start the axis at zero where nothing lies below it, so that small wiggles do not look large."""
    low, high = axes.get_ylim()
    data_low, data_high = axes.dataLim.intervaly
    if data_low >= 0:
        axes.set_ylim(0, data_high * 1.12 if data_high > 0 else 1)
    else:
        axes.set_ylim(low, high)


def _legend(axes, lines: list) -> None:
    """Put the legend beside the title, where no curve can pass under it."""
    axes.legend(
        handles=lines, fontsize=11, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False,
        borderaxespad=0.3, columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip
