"""Which metrics depend on the clock or the machine, so that two equal runs have different values."""

OF_MACHINE = ("time/", "memory/")  # prefixes of names
OF_CLOCK = ("_per_s", "/sync_s", "perf/mfu", "environment/step_s", "/waiting_share")  # endings of names
# What happened to processes, and is mended: it changes nothing else.
OF_ACCIDENTS = ("environment/restarts", "environment/timeouts", "environment/journalled_steps")


def is_reproducible(name: str) -> bool:
    """Whether a metric has the same bits in each repetition of a run: all but those of time, memory and accidents."""
    return not name.startswith(OF_MACHINE) and not name.endswith(OF_CLOCK + OF_ACCIDENTS)


def reproducible(row: dict) -> dict:
    """A step's metrics without those of time and memory."""
    return {name: value for name, value in row.items() if is_reproducible(name)}
