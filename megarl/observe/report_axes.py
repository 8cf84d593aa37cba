"""Drawing helpers that give all panels of a report the same look."""

GREY = "0.45"


def series(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, without the steps where it is missing or not finite."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def set_title(axes, text: str) -> None:
    """Write the panel's title."""
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
