"""Which evaluation was the best: of a higher or a lower metric, on every rank, also after a resume."""

import json
import math

import pytest

from tests.helpers.worlds import run_world

CASES = {
    "accuracy": ([0.0, 0.25, 0.25, 0.125, 0.5, 0.25], [True, True, False, False, True, False], 5),
    "loss": ([math.nan, 0.25, 0.25, 0.125, math.nan, 0.5], [False, True, False, True, False, False], 4),
}


def ranked(rank: int, metric: str, values: list[float]) -> tuple:
    """Verdicts and state of a run of evaluations, resumed in the middle."""
    from megarl.trainers.events import BestCheckpoint

    best, verdicts = BestCheckpoint(metric), []
    before = best.state_dict()
    for step, value in enumerate(values, 1):
        verdicts.append(best.update({f"eval/{metric}": value} if rank == 0 else None, step))
        if step == 3:
            state, best = json.loads(json.dumps(best.state_dict())), BestCheckpoint(metric)
            best.load_state_dict(state)
    return verdicts, before, best.state_dict()


@pytest.mark.parametrize("metric", CASES)
def test_every_rank_knows_which_evaluation_is_the_best(metric):
    values, expected, step = CASES[metric]
    states = {metric: None, "step": None}, {metric: values[step - 1], "step": step}
    assert run_world(ranked, 2, metric, values) == [(expected, *states)] * 2
