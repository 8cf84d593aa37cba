"""Which rows continue which state: the runs of a packed stream, those of decode steps, and wrong ones."""

import pytest
import torch

from megarl.mcore.kernels import native
from megarl.mcore.recurrence.runs import NONE, Runs
from tests.helpers.models.recurrent_inputs import DELTA, drawn, empty_states, of_table, runs_of


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


@pytest.mark.skipif(not native.is_built(), reason=native.absence())
@pytest.mark.parametrize(
    "table", [[[0, 11, NONE, 0]], [[0, 10, NONE, 1]], [[0, 10, 1, 0]], [[-1, 2, NONE, 0]]], ids=str
)
def test_runs_of_rows_or_states_that_are_not_there_are_refused(table):
    with pytest.raises(RuntimeError, match="a run of rows or states that are not there"):
        of_table(drawn(10, DELTA), DELTA, table, empty_states(1, DELTA))
