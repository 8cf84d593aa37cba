"""What ends responses and thoughts: budgets, texts and tokens that cannot work are refused."""

import pytest

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import inputs
from tests.helpers.rollout.thinkers import TEXT, TURNS, thinking_argv


@pytest.mark.parametrize(("flags", "says"), [
    (f"--thinking-budget 13 --thinking-budget-text {TEXT}",
     "--thinking-budget 13: with the 3 tokens that end thoughts, --max-response-length 16 leaves no room"),
    ("--thinking-budget-text +=", "--thinking-budget-text: needs </think>, with which this policy ends its thoughts"),
    (f"{TURNS} --thinking-budget 11", "--thinking-budget 11: with the 3 tokens that end thoughts, --max-turn-length"),
    ("--tool-call-parser mistral", "--thinking-budget-text: needs [/THINK], with which"),
    ("--tool-call-parser none", "--tool-call-parser none: "),
    ("--tokenizer-model {}", "--thinking-budget-text: its tokens do not end thoughts: they read"),
], ids=str)  # fmt: skip
def test_a_budget_that_cannot_work_is_refused(flags, says, tmp_path):
    assert says in refusal(thinking_argv(tmp_path / "none", flags.format(inputs() / "tokenizer.model")))
