"""Panels of a MoE policy: expert load, router disagreement, and the log-prob gap with and without router replay."""

import re

from megarl.observe.report_axes import GREY, legend, line, not_recorded, series, set_title, start_at_zero

LOAD, DISAGREEMENT, REPLAYED, LIVE = "tab:olive", "tab:red", "tab:green", "tab:red"


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


def load(axes, rows: list[dict]) -> None:
    """Load of the busiest expert above the mean; 0 is balanced."""
    set_title(axes, "Load imbalance")
    _by_layer(axes, rows, "router/load_imbalance", LOAD)


def disagreement(axes, rows: list[dict]) -> None:
    """Fraction of replayed tokens for which the live router selects other experts."""
    set_title(axes, "Disagreement")
    _by_layer(axes, rows, "router/disagreement", DISAGREEMENT)


def gaps(axes, rows: list[dict]) -> None:
    """Mean log-prob gap on probe batches, with and without the rollout's routes."""
    set_title(axes, "Mean log-prob gap")
    curves = [("replayed", "router/gap_replayed", REPLAYED, "-"), ("live", "router/gap_live", LIVE, "--")]
    present = [curve for curve in curves if series(rows, curve[1])[0]]
    if not present:
        return not_recorded(axes)
    legend(axes, [line(axes, rows, name, color, label, style) for label, name, color, style in present])
    axes.set_yscale("symlog", linthresh=1e-7)  # zero, the best value, has no logarithm
    axes.set_ylim(bottom=0)


PANELS = (load, disagreement, gaps)
