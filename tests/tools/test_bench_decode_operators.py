"""The count of a decode step's operators: what counts as one, which steps count, the counts of a small engine."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.tools import SMALL
from tests.helpers.worlds import run_world
from tools.bench import decode_operators


class KnownSteps:
    """An engine whose counted steps call three operators and two in each layer; other steps call others."""

    def __init__(self, layers: int):
        self.engine, self.number = self, 0
        self.context = SimpleNamespace(padded_active_token_count=8)
        self.model = SimpleNamespace(decoder=SimpleNamespace(layers=[None] * layers))

    def step_modern(self):
        self.number += 1
        x = torch.ones(4, 4)
        if decode_operators.SKIPPED < self.number <= decode_operators.SKIPPED + decode_operators.STEPS:
            for _ in self.model.decoder.layers:
                torch.nn.functional.linear(x, x).mm(x)
            return x.exp().log()
        return x.sigmoid()

    def generate(self, *_):
        for _ in range(decode_operators.NEW_TOKENS):
            self.step_modern()


def counted(rank: int) -> tuple[dict, int]:
    engines, case = (KnownSteps(4), KnownSteps(2)), decode_operators.case_of(2, SMALL.vocab)
    watch = decode_operators.StepWatch(KnownSteps(1), case)
    assert watch.seconds() > 0
    return decode_operators.count(engines, case), watch.rows


def test_an_operator_counts_once_whatever_it_calls():
    ((found, rows),) = run_world(counted, 1)
    calls = {name: number for name, number, _ in found["operators"]}
    assert calls == {"aten::linear": 4, "aten::mm": 4, "aten::exp": 1, "aten::log": 1, "aten::ones": 1}
    assert (found["per_layer"], found["per_step"], rows) == (2, 11, 8)


def measured(rank: int) -> list[dict]:
    return decode_operators.measure(SMALL, [3], 1)


@pytest.mark.long
def test_a_small_engine():
    ((row,),) = run_world(measured, 1)
    assert (row["requests"], row["rows"]) == (3, 4)
    assert row["per_step"] > SMALL.layers * row["per_layer"] > 0
    assert {name: len(times) for name, times in row["seconds"].items()} == {"step": 1, "products": 1}
    assert row["outside"] == 1 - row["products_s"] / row["step_s"]
    text = decode_operators.table([row], markdown=True).splitlines()
    assert text[0] == "| requests | rows | per layer | per step | time | products | outside |" and len(text) == 3
    assert row["operators"][0][0] in decode_operators.names_table(row, 1, markdown=False)
    json.dumps(row)


def test_wrong_flags(refusal):
    cases = ((["--requests", "4,some"], "--requests 4,some: allowed are whole numbers above 0, separated by commas"),
             (["--layers", "1"], "--layers 1 --rounds 5: allowed are at least 2 layers and 1 round"))  # fmt: skip
    for argv, message in cases:
        assert message in refusal(decode_operators.main, argv)
