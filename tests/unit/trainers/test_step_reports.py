"""Reports of steps through a real TCPStore, whose limits a FileStore does not have: large, odd and hostile ones."""

import json
import math
import pickle
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.trainers.step_reports import AsyncMetrics, StepReport
from tests.helpers.worlds import SAFETY, run_world


def report(rank: int, samples=()) -> StepReport:
    return StepReport({"a/b": 0.1 + rank}, {("actor", "update"): 1 / 3, ("", "step"): 2.5}, 1.5, list(samples))


def long_samples(rank: int) -> list[dict]:
    """64 responses of 300,000 characters: 19 MB."""
    return [{"sequence": i, "response": f"{rank}{i}é" * 60_000} for i in range(64)]


def over_tcp(rank: int, function):
    """Runs `function(rank, store)` with a TCPStore as the default group's store."""
    file_store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=SAFETY)
        file_store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(file_store.get("port")), 2, is_master=False, timeout=SAFETY)
    dist.distributed_c10d._get_default_store = lambda: store
    result = function(rank, store)
    dist.barrier()  # rank 0 serves the store
    return result


def publish_long_samples(rank: int, store):
    async_reports = AsyncMetrics(SimpleNamespace(rank=rank, size=2), SAFETY)
    async_reports.publish(1, report(rank, long_samples(rank) if rank else ()))
    found = async_reports.poll(wait=True)
    if rank == 0:
        (step, (own, other)) = found[0]
        assert step == 1 and own == report(0) and other == report(1, long_samples(1))
        dist.barrier()
        return store.num_keys()
    dist.barrier()


def test_a_rank_with_64_long_samples_ends_its_step():
    """A TCPStore closes the connection on a value above 8 MiB."""
    left, _ = run_world(over_tcp, 2, publish_long_samples)
    assert left <= 1, "reports stay in the store"  # the store counts one key of its own


class Mine:
    """Its pickle raises when loaded."""

    def __reduce__(self):
        return exec, ("raise SystemError('code of a stranger has run')",)


HOSTILE = [
    pickle.dumps(Mine()),
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    json.dumps([{}, [], 1.0, [{"no": "sequence"}]]).encode(),
    json.dumps([{"a": "text"}, [], 1.0, []]).encode(),
    json.dumps([{}, [["actor", "update", "x"]], 1.0, []]).encode(),
]


def read_hostile(rank: int) -> list[str]:
    """The message for each hostile report of rank 1, and for wrong numbers of pieces."""
    store, messages = dist.HashStore(), []
    dist.distributed_c10d._get_default_store = lambda: store
    for step, data in enumerate([*HOSTILE, b"-1", b"1000000", b"x", b"2"]):
        key = AsyncMetrics._key(step, 1)
        if step < len(HOSTILE):
            store.set(f"{key}/0", data)
        store.set(key, "1" if step < len(HOSTILE) else data)
        reports = AsyncMetrics(SimpleNamespace(rank=0, size=2), timedelta(seconds=1))
        reports.publish(step, report(0))
        with pytest.raises(RuntimeError) as error:
            reports.poll(wait=False)
        messages.append(str(error.value))
    return messages


def test_nothing_in_the_store_is_unpickled_or_believed():
    messages = run_world(read_hostile, 1)[0]
    for step, message in enumerate(messages):
        assert message.startswith(f"the report of rank 1 on step {step} is damaged: "), message
    assert len(messages) == len(HOSTILE) + 4


def test_reports_read_back_as_the_same_numbers():
    metrics = {"a": 0.1, "b": 5e-324, "c": math.inf, "d": 7, "e": True, "f": 1e23, "g": np.float64(0.3),
               "h": torch.tensor(2.5)}  # fmt: skip
    samples = [{"sequence": 3, "response": "é\ud800\n", "parts": {"x": 0.2}, "none": None}]
    sent = StepReport(metrics, {("actor", "update"): 1e-9}, 0.5, samples)
    found = StepReport.decode(sent.encode())
    assert found == sent._replace(metrics={**metrics, "h": 2.5})
    assert [type(found.metrics[name]) for name in "de"] == [int, bool]
    assert math.isnan(StepReport.decode(sent._replace(metrics={"a": math.nan}).encode()).metrics["a"])
    with pytest.raises(TypeError, match="a report holds a set"):
        sent._replace(samples=[{"sequence": {1}}]).encode()
