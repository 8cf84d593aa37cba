"""The table of a run's phases: what each call does, and the time that it is predicted to take."""

from tests.cuda_walk.cost.phases import Phase
from tests.cuda_walk.cost.timeline import H100, Prediction, predict

COLUMNS = ("role", "phase", "kernels", "in graphs", "GB", "TFLOP", "sends", "waits", "sent GB", "kernels ms",
           "host ms", "ms", "calls", "s a step")  # fmt: skip
MICRO = 1e6


def text(phases: list[Phase], operators: int = 0) -> str:
    """The table, and what it assumes. Counts and times are of one call, except for the last column.

    `operators`: how many of each phase are named, those that take most of the device's time.
    """
    rows, slowest, total = [COLUMNS], [], 0.0
    for phase in phases:
        found = predict(phase.events)
        seconds = found.seconds + (H100.step if phase.is_step else 0.0)
        total += seconds * phase.calls
        rows.append(_row(phase, found, seconds))
        names = [f"{name} {1e3 * own:.2f}" for name, own in found.by_name.most_common(operators)]
        slowest += [f"{phase.role}, {phase.name}, ms: {', '.join(names)}"] if names else []
    last = f"{total:,.1f} s a step, if phases and roles take turns", _assumed(), *slowest
    return "\n".join([aligned(rows, 2), *last])


def aligned(rows: list[tuple], names: int) -> str:
    """Rows as lines; the first `names` columns begin, and the others end, below each other."""
    widths = [max(len(str(value)) for value in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{value!s:{'<' if i < names else '>'}{widths[i]}}" for i, value in enumerate(row)) for row in rows
    )


def _row(phase: Phase, found: Prediction, seconds: float) -> tuple:
    return (
        phase.role, phase.name, found.eager, found.in_graph, f"{found.bytes / 1e9:.2f}", f"{found.flops / 1e12:.2f}",
        found.sends, found.waits, f"{found.sent / 1e9:.3f}", f"{found.device * 1e3:.2f}", f"{found.host * 1e3:.2f}",
        f"{seconds * 1e3:.2f}", phase.calls, f"{seconds * phase.calls:.1f}",
    )  # fmt: skip


def _assumed() -> str:
    c = H100
    return (
        f"Predicted for H100s, not measured: {c.bandwidth / 1e12:.1f} TB/s, {c.flops / 1e12:.0f} TFLOP/s, a kernel"
        f" {c.kernel * MICRO:.1f} µs more and {c.gap * MICRO:.1f} µs between two; of the host {c.operator * MICRO:.0f}"
        f" µs for an operator, {c.call * MICRO:.0f} µs for one of autograd's, a copy or a graph"
    )
