"""The table of operators by phase: which phase an operator belongs to, what is summed, and what is shown."""

from types import SimpleNamespace

from torch.autograd import DeviceType

from megarl.observe.profiler import ROWS, table
from megarl.observe.timers import Timers

PHASES = {"actor/update", "actor/exchange"}


def event(
    name: str, start: float, end: float, cpu: float = 0.0, device: float = 0.0, memory: int = 0, gpu: bool = False
):
    """One of torch's events; times in microseconds."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), self_cpu_time_total=cpu,
        self_device_time_total=device, self_cpu_memory_usage=memory, self_device_memory_usage=0,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
    )  # fmt: skip


def test_an_operator_belongs_to_the_innermost_phase_that_is_open():
    events = [
        event("actor/update", 100, 900), event("actor/exchange", 300, 400), event("actor/exchange", 950, 990),
        event("mm", 150, 250, cpu=100), event("mm", 310, 320, cpu=10), event("mm", 400, 500, cpu=50, device=7),
        event("mm", 900, 905, cpu=5), event("add", 10, 20, cpu=3), event("add", 960, 970, cpu=4),
        event("actor/update", 500, 5000, gpu=True), event("kernel", 400, 407, device=7, gpu=True),
    ]  # fmt: skip
    assert table(events, PHASES).splitlines() == [
        "actor/update: 0.16 ms in 2 calls",
        "  CPU ms  device ms  calls  operator",
        "    0.15       0.01      2  mm",
        "actor/exchange: 0.01 ms in 2 calls",
        "  CPU ms  device ms  calls  operator",
        "    0.01       0.00      1  mm",
        "    0.00       0.00      1  add",
        "(between phases): 0.01 ms in 2 calls",
        "  CPU ms  device ms  calls  operator",
        "    0.01       0.00      1  mm",
        "    0.00       0.00      1  add",
    ]


def test_the_most_expensive_operators_come_first_and_the_others_are_counted():
    events = [event(f"op{i}", i, i + 1, cpu=1000.0 * i, memory=-i * 2**20) for i in range(ROWS + 3)]
    lines = table(events, PHASES, memory=True).splitlines()
    assert len(lines) == ROWS + 3 and lines[-1] == "  … and 3 more operators"
    assert lines[1].split() == ["CPU", "ms", "device", "ms", "calls", "MiB", "operator"]
    last = ROWS + 2
    assert lines[2].split() == [f"{last}.00", "0.00", "1", f"-{last}.00", f"op{last}"]


def test_phases_are_annotated_only_where_asked():
    seen = []

    class Note:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(f"+{self.name}")

        def __exit__(self, *_):
            seen.append(f"-{self.name}")

    timers = Timers()
    with timers.phase("actor", "read"):
        pass
    with timers.annotated(Note) as names, timers.phase("actor", "update"), timers.evaluation():
        with timers.phase("actor", "rollout"):
            pass
    with timers.phase("actor", "read"):
        pass
    assert seen == ["+actor/update", "+actor/eval_rollout", "-actor/eval_rollout", "-actor/update"]
    assert names == {"actor/update", "actor/eval_rollout"}
