"""Decode steps planned on the device: on a CPU, with interpreted kernels, they give what those of the host give. When
they are captured, replayed and captured again; a stand-in takes the place of CUDA's graphs."""

import types
from dataclasses import replace

import pytest
import torch

from megarl.mcore.inference import device_decode
from megarl.mcore.inference.device_decode import DeviceDecode, StepGraphs
from megarl.mcore.moe import equal_rows
from megarl.mcore.training import optimizer
from tests.helpers.models import reference_kernels
from tests.helpers.models.tiny_models import build
from tests.helpers.pages.combinations import MAMBA, RECURRENT
from tests.helpers.rollout.engines import (
    LIMIT,
    generate_standard,
    largest_gap,
    make_engine,
    make_requests,
    on_device,
    settings_of,
    texts,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import on_each_rank, run_world

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
SETTINGS = [{}, {"temperature": 0.7}, {"greedy": True}]  # of requests, in turn


def generated(rank, flags=""):
    """Completions of requests with settings of their own, and their gap to the training forward."""
    engine, model, _ = make_engine(flags)
    kinds = [settings_of(**kind) for kind in SETTINGS]
    requests = [replace(r, sampling=kinds[i % len(kinds)]) for i, r in enumerate(make_requests())]
    completions, step = engine.generate(requests, (), settings_of()), len(kinds)
    gaps = [largest_gap(model, requests[i::step], completions[i::step], kinds[i].temperature) for i in range(step)]
    return completions, float(torch.tensor(gaps).max())  # NaN when one is


@pytest.mark.parametrize("ranks, flags", [
    long((1, "")), (1, "--window-size 5,0"), long((1, EXPERTS)), (1, "--qk-layernorm --num-query-groups 4"),
    long((2, "--tensor-model-parallel-size 2")), long((2, "--tensor-model-parallel-size 2 --sequence-parallel")),
    long((2, f"{EXPERTS} --expert-model-parallel-size 2")),
    (2, f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    (1, RECURRENT), (1, MAMBA), long((2, f"{RECURRENT} --tensor-model-parallel-size 2 --sequence-parallel")),
], ids=str)  # fmt: skip
def test_the_device_plans_what_the_host_plans(ranks, flags):
    expected = run_world(generated, ranks, flags)
    found = run_world(on_device, ranks, generated, flags)
    for (completions, gap, device_steps, host_steps), (others, _) in zip(found, expected, strict=True):
        assert texts(completions) == texts(others)
        assert gap < 1e-5 and device_steps >= LIMIT - 2 and host_steps == 0


def above_the_bound(rank):
    equal_rows.MAX_BYTES = 16 * 2 * 2 * 64 * 4  # 16 rows of two ranks, two experts a row
    return on_device(rank, generated, f"{EXPERTS} --expert-model-parallel-size 2")


def test_steps_of_more_rows_than_messages_hold_are_planned_by_the_host():
    ((expected, _),) = run_world(generated, 1, EXPERTS)
    for completions, gap, device_steps, host_steps in run_world(above_the_bound, 2):
        assert texts(completions) == texts(expected)
        assert gap < 1e-5 and device_steps == 0 and host_steps >= LIMIT - 2


def unequal_replicas(rank):
    """(this replica's completions, rows of each step that the device planned, how many requests it had in each)."""
    reference_kernels.use_them()
    engine, _, _ = make_engine(f"--attention-backend varlen {EXPERTS} --expert-model-parallel-size 2")
    steps, real = [], DeviceDecode.run

    def run(self, rows):
        steps.append((rows, self.context.total_request_count))
        return real(self, rows)

    DeviceDecode.run = run  # type: ignore[method-assign]
    requests = make_requests(LIMIT if rank == 0 else 4, 20)[: 20 if rank == 0 else 3]
    return engine.generate(requests, (), settings_of(), True), *zip(*steps, strict=True)


def test_replicas_that_share_experts_have_the_most_rows_of_any_in_each_step():
    """One of them has few requests, which end early: then it computes experts of the other's rows."""
    ((expected, _),) = run_world(generate_standard, 1, EXPERTS)
    (first, rows, _), (second, same_rows, counts) = run_world(unequal_replicas, 2)
    assert rows == same_rows == (32,) * (LIMIT - 1) and counts == (3,) * 3 + (0,) * (LIMIT - 4)
    assert texts(first) == texts(expected)
    assert texts(second) == [tokens[:4] for tokens in texts(expected)[:3]]
    assert all(len(one.routes) == len(p.prompt) + len(one.tokens) for one, p in zip(first, make_requests()))
    assert all((one.routes[:-1] >= 0).all() for one in [*first, *second])


# -- CUDA graphs -----------------------------------------------------------------------------------------------------


class Recorded:
    """A graph that runs its function again, and writes into the outputs of the capture, as CUDA's do."""

    def __init__(self, function):
        self.function, self.outputs, self.replays = function, torch.full((2,), -1.0), 0

    def replay(self):
        self.replays += 1
        self.outputs.copy_(self.function())


@pytest.fixture
def graphs(monkeypatch):
    """A runner with stand-ins."""
    runner = StepGraphs()

    def capture(function):
        graph = Recorded(function)
        return graph, graph.outputs, []

    monkeypatch.setattr(runner, "_capture", capture)
    return runner


def test_a_key_runs_once_and_is_captured_then(graphs):
    memory, calls = torch.ones(2), []

    def function():
        calls.append(1)
        return memory * 3

    graphs.begin([memory])
    for number in range(4):
        memory.fill_(number)
        assert graphs.run("a", function).tolist() == [3.0 * number] * 2  # also in the step that captures
    graph = graphs._graphs["a"][0]
    assert graph.replays == 3 and len(calls) == 4
    assert graphs.run("b", lambda: memory).tolist() == [3.0, 3.0] and graphs._graphs["b"] is None


def test_graphs_are_kept_until_their_memory_moves(graphs):
    memory = torch.ones(2)
    graphs.begin([memory])
    for _ in range(2):
        graphs.run("a", lambda: memory + 1)
    graphs.begin([memory])
    assert graphs._graphs["a"][0].replays == 1
    graphs.begin([memory.clone()])
    assert not graphs._graphs


def test_graphs_are_dropped_where_memory_moved_on_another_rank(graphs):
    """Their collectives would be part of a graph on some ranks only."""
    memory, asked = torch.ones(2), []
    for _ in range(2):
        graphs.begin([memory], lambda has_moved: asked.append(has_moved) or True)
        for _ in range(2):
            graphs.run("a", lambda: memory + 1)
        assert graphs._graphs["a"][0].replays == 1
    assert asked == [True, False]


def test_a_graph_holds_what_it_reads_and_has_not_made():
    table, weight = torch.arange(8.0), torch.ones(4, 4)
    with device_decode._MemoryRead() as read:
        made = table[2:6] * 2
        made.add_(weight[0])
        made.view(2, 2).mul_(2)
    assert read.held.keys() == {table.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize(
    "flags, is_capturable",
    [("", True), ("--num-experts 4 --moe-router-topk 2", False), ("--bf16 --use-torch-fsdp2", False)],
)
@on_each_rank()
def test_what_the_host_reads_or_moves_is_not_captured(rank, flags, is_capturable):
    model, args, place = build(flags)
    optimizer.wrap_for_training([model], args, place.pg_collection)
    device_decode.device = types.SimpleNamespace(has_cuda=lambda: True)
    assert device_decode.can_capture(model) == is_capturable
