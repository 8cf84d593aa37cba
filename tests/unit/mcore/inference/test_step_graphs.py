"""When decode steps are captured, replayed and captured again; a stand-in takes the place of CUDA's graphs."""

import types

import pytest
import torch

from megarl.mcore.inference import step_graphs
from megarl.mcore.inference.step_graphs import StepGraphs
from megarl.mcore.training import optimizer
from tests.helpers.models.tiny_models import build
from tests.helpers.worlds import on_each_rank


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
    with step_graphs._MemoryRead() as read:
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
    step_graphs.device = types.SimpleNamespace(has_cuda=lambda: True)
    assert step_graphs.can_capture(model) == is_capturable
