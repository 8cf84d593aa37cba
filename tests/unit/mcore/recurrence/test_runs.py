"""Which rows continue which state: the runs of a packed stream, those of decode steps, and wrong ones. Where runs leave
states; what a device computes leaves the same ones."""

import pytest
import torch

from megarl.mcore.kernels import native
from megarl.mcore.recurrence.rule import apply_rule
from megarl.mcore.recurrence.runs import NONE, Runs
from tests.helpers.models.recurrent_inputs import DELTA, SPACE, TAPS, drawn, empty_states, of_table, relative, runs_of

needs_kernels = pytest.mark.skipif(not native.is_built(), reason=native.absence())


def test_runs_of_a_stream():
    assert runs_of([3, 2], padding=0).table.tolist() == [[0, 3, NONE, NONE], [3, 2, NONE, NONE]]
    runs = runs_of([5, 4, 3, 4], [0, 0, 2, 0], [0, 3, 0, 2], padding=1)
    assert runs.table.tolist() == [
        [0, 2, NONE, 0], [2, 1, 0, 1],  # prefixes of the first sequence: two tokens, three tokens
        [3, 2, 1, NONE], [5, 1, 1, NONE], [6, 3, NONE, NONE], [9, 2, 0, NONE], [11, 1, NONE, NONE],
    ]  # fmt: skip
    assert runs.states == 2 and runs.rows == 12


def test_only_steps_of_single_rows_that_stay_in_their_states_are_decodes():
    steps = {
        "decode": [[0, 1, 2, 2], [1, 1, 0, 0], [2, 1, NONE, NONE]], "padding": [[0, 1, NONE, NONE]],
        "two rows": [[0, 2, 1, 1]], "a copy": [[0, 1, 1, 1], [0, 0, 1, 2]], "a beginning": [[0, 1, NONE, 1]],
    }  # fmt: skip
    found = {name: Runs(torch.tensor(table), 0, 4).decodes for name, table in steps.items()}
    assert found.pop("decode").tolist() == [2, 0, NONE] and set(found.values()) == {None}


@needs_kernels
@pytest.mark.parametrize(
    "table", [[[0, 11, NONE, 0]], [[0, 10, NONE, 1]], [[0, 10, 1, 0]], [[-1, 2, NONE, 0]]], ids=str
)
def test_runs_of_rows_or_states_that_are_not_there_are_refused(table):
    with pytest.raises(RuntimeError, match="a run of rows or states that are not there"):
        of_table(drawn(10, DELTA), DELTA, table, empty_states(1, DELTA))


@needs_kernels
def test_states_are_left_where_a_run_says():
    inputs, states = drawn(10, DELTA), empty_states(4, DELTA)
    of_table(inputs, DELTA, [[0, 6, NONE, 3], [6, 4, NONE, NONE], [0, 0, 3, 1]], states)
    assert states.inputs[0].isnan().all() and states.memories[2].isnan().all()
    assert torch.equal(states.inputs[3], inputs.x[3:6]) and torch.equal(states.memories[3], states.memories[1])
    of_table(inputs.at(torch.tensor([6])), DELTA, [[0, 1, 3, 3]], states)
    assert torch.equal(states.inputs[3], inputs.x[4:7]) and not torch.equal(states.memories[3], states.memories[1])
    short = empty_states(1, DELTA)
    of_table(inputs.at(torch.arange(2)), DELTA, [[0, 2, NONE, 0]], short)
    assert torch.equal(short.inputs[0], torch.cat([torch.zeros(1, DELTA.channels), inputs.x[:2]]))


@needs_kernels
@pytest.mark.parametrize("sizes", [DELTA, SPACE], ids=["delta rule", "state space"])
def test_what_a_device_computes_keeps_the_same_states(sizes):
    """What a device computes: prefills, a copy, decode steps with padding, a prompt in two parts, and prompts whose
    states at ends of blocks are kept; one of them continues another's, and ends there."""
    kept, own = empty_states(5, sizes), empty_states(5, sizes)
    passes = [
        [[0, 70, NONE, 0], [70, 9, NONE, 2], [0, 0, 0, 1], [79, 2, NONE, NONE]],
        [[0, 1, 0, 0], [1, 1, 1, 1], [2, 1, 2, 2], [3, 1, NONE, NONE]],
        [[0, 1, 2, 2], [1, 1, 0, 0]],
        [[0, 1, 1, 1], [1, 66, 2, 2], [67, 1, NONE, 0]],
        [[0, 0, 2, 1], [0, 3, 1, 1]],
        [[0, 64, NONE, 3], [64, 6, 3, 0], [70, 64, 2, 4], [134, 0, 4, 1]],
        [[0, 6, 3, 2], [6, 1, 4, 0], [7, 1, NONE, NONE]],
    ]
    for number, table in enumerate(passes):
        runs = Runs(torch.tensor(table), 0, TAPS)
        inputs = drawn(runs.rows, sizes, seed=number)
        assert (runs.decodes is not None) == (number in (1, 2))
        if runs.decodes is None:
            found = inputs.by_chunks(sizes, runs, own)
        else:
            found = inputs.one_token(sizes, runs.decodes, own)
        expected = apply_rule(inputs, sizes, runs, kept)
        counted = [row for first, rows, _, after in table if after != NONE for row in range(first, first + rows)]
        assert relative(found[counted], expected[counted]) <= 1e-5
        written = [state for state in range(5) if not kept.memories[state].isnan().any()]
        assert written == list(range(5 if number > 4 else 3)) and torch.equal(own.inputs[written], kept.inputs[written])
        assert relative(own.memories[written], kept.memories[written]) <= 1e-5
