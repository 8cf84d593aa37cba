"""Which metrics depend on the clock or the machine, so that two equal runs may have different values."""

OF_MACHINE = ("time/", "memory/")  # prefixes of names
OF_CLOCK = ("_per_s", "/sync_s", "perf/mfu", "environment/step_s", "/waiting_share")  # endings of names
OF_ORDER = ("rollout/prefill_tokens", "rollout/reused_tokens")  # what a full cache loses: the order of requests decides
# Events of processes that were repaired: they change no other number.
OF_ACCIDENTS = ("environment/restarts", "environment/timeouts", "environment/journalled_steps")


def is_reproducible(name: str) -> bool:
    """Whether a metric has the same bits in each repetition of a run: all but those of time, memory and accidents."""
    is_clock = name.startswith(OF_MACHINE) or name.endswith(OF_CLOCK)
    return not is_clock and name not in OF_ORDER + OF_ACCIDENTS


def reproducible(row: dict) -> dict:
    """A step's metrics without those of time and memory."""
    return {name: value for name, value in row.items() if is_reproducible(name)}
