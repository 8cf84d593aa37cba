"""Values that the fields of megarl's own flags refuse."""

import pytest

from tests.helpers.flag_rules import refused
from tests.helpers.pages.flag_cases import FIELDS, OUTSIDE, flag_of


@pytest.mark.parametrize("field", [f for f in FIELDS if f.metadata["check"]], ids=lambda f: f.name)
def test_values_outside_the_allowed_range_are_rejected(field):
    usual = ("-1", "-0.5", "nan") if "float" in str(field.type) else ("-1",)
    for value in OUTSIDE.get(field.name, usual):
        message = refused([flag_of(field), value], program=field.metadata["programs"][0])
        assert flag_of(field) in message and value in message and field.metadata["allowed"] in message


@pytest.mark.parametrize("field", [f for f in FIELDS if "float" in str(f.type)], ids=lambda f: f.name)
def test_no_flag_takes_nan_or_an_infinity(field):
    for value in ("nan", "inf", "-inf"):
        message = refused([f"{flag_of(field)}={value}"], program=field.metadata["programs"][0])
        assert f"{flag_of(field)} {value}: allowed is" in message


@pytest.mark.parametrize("argv, says", [
    (["--lora-rank", "0"], "--lora-rank 0: allowed is a number above 0; leave it out to train all weights"),
    (["--gamma", "1.5"], "between 0 and 1"), (["--top-p", "0"], "above 0, at most 1"),
    (["--top-p", "1.01"], "above 0, at most 1"), (["--train-iters", "x"], "--train-iters"),
    (["--temperature", "1", "--temperature"], "--temperature"), (["--deterministic", "perhaps"], "true or false"),
    (["--lr", "abc"], "--lr"), (["--lr", "-1"], "--lr -1"), (["--critic-lr", "x"], "critic"),
    (["--lr-decay-style", "odd"], "--lr-decay-style"),
])  # fmt: skip
def test_wrong_values_are_rejected(argv, says):
    message = refused(argv)
    assert argv[0].replace("--critic-", "--") in message and says in message
