"""The comparison of decode steps of recurrent layers, on small ones."""

import pytest

from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.worlds import run_world
from tools.bench import recurrent_step

FLAGS = "--requests 1,3 --hidden 64 --heads 4 --channels 16 --rounds 2"


def measured(rank: int) -> list[dict]:
    return recurrent_step.measure(recurrent_step.parse(FLAGS.split()))


@needs_kernels
def test_each_side_has_a_row_for_each_number_of_requests():
    (found,) = run_world(measured, 1)
    assert [(row["requests"], row["side"]) for row in found] == [(n, x) for n in (1, 3) for x in recurrent_step.SIDES]
    assert all(len(row["seconds"]) == 2 and row["ratio"] > 0 for row in found)
    assert all(row["ratio"] == 1.0 for row in found if row["side"] == recurrent_step.NET)
    assert len(recurrent_step.table(found, markdown=True).splitlines()) >= 7


def test_wrong_numbers_are_refused(capsys):
    with pytest.raises(SystemExit):
        recurrent_step.parse(["--requests", "0"])
    assert "--requests 0 --rounds 20: allowed are whole numbers above 0" in capsys.readouterr().err
