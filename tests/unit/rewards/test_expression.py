"""The value of --reward: weights, names, and one-line errors."""

import pytest

from megarl.rewards.expression import Term, parse
from tests.helpers.texts.refusals import refusal


@pytest.mark.parametrize("text, terms", [
    ("model", [(1.0, "model")]),
    ("model+0.2*format+0*reasoning-gym", [(1.0, "model"), (0.2, "format"), (0.0, "reasoning-gym")]),
    (" 2 * exact-match +\t-.5*length ", [(2.0, "exact-match"), (-0.5, "length")]),
    ("a.b:f1e+1e+3*code+1e-2*c:d", [(1.0, "a.b:f1e"), (1000.0, "code"), (0.01, "c:d")]),
])  # fmt: skip
def test_terms(text, terms):
    assert parse(text) == tuple(Term(*term) for term in terms)


@pytest.mark.parametrize("text, message", [
    ("", "malformed at its end"), ("model+", "malformed at its end"), ("2*", "malformed at 2*;"),
    ("code,format,", "has a comma in code,format,;"),
    ("2*3*model", "malformed at 2*3*model;"), ("+model", "malformed at +model"),
    ("code model", "malformed at code model"), ("model+2e*code", "malformed at 2e*code"),
    ("model+exactmatch", "exactmatch is unknown; allowed: model, judge"), ("0.2format", "0.2format is unknown"),
    ("a:b:c", "a:b:c is unknown"), ("a-b:c", "a-b:c is unknown"), (".a:c", ".a:c is unknown"), ("a:", "a: is unknown"),
    ("length+cosine", "cosine needs a term that says which responses are correct, as in 0*math-verify+cosine"),
    ("2*truncated+adaptive-length", "adaptive-length and truncated change the reward of other terms; name one"),
    ("code+2*code", "code appears twice"), ("1e999*code", "the weight of code is inf, not a finite number"),
    ("1e30*code", "the weight of code is 1e+30; allowed is -1e+09 to 1e+09"),
])  # fmt: skip
def test_wrong_expressions(text, message):
    assert refusal(parse, text).startswith(f"--reward {text}: {message}")
