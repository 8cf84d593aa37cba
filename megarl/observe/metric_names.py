"""Which metrics depend on the clock or the machine, so that two equal runs have different values."""

TIMED = ("time/", "_per_s", "/sync_s", "perf/mfu")  # substrings of the names of time metrics
MACHINE = ("memory/",)  # prefixes of the names of memory metrics


def is_reproducible(name: str) -> bool:
    """Whether a metric has the same bits in each repetition of a run: all but those of time and memory."""
    return not name.startswith(MACHINE) and not any(part in name for part in TIMED)


def reproducible(row: dict) -> dict:
    """A step's metrics without those of time and memory."""
    return {name: value for name, value in row.items() if is_reproducible(name)}
