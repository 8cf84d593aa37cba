"""One line for wrong input: its form, its bounds, and who prints it."""

import types

import pytest

from megarl.errors import MAX_LINE, WARNED, ArgumentParser, Rule, UsageError, flag_of, one_line, warn_as_first


def test_a_text_from_outside_becomes_one_line_of_bounded_length():
    assert one_line("a\nb\x1b[2Jé") == "a\\nb\\x1b[2Jé"
    assert len(one_line("x" * (2 * MAX_LINE))) == MAX_LINE and one_line("x" * MAX_LINE)[-1] == "x"


def test_a_rule_names_its_flag_and_the_value_that_breaks_it():
    settings = types.SimpleNamespace(kl_target=0.1)
    assert flag_of("kl_target") == "--kl-target"
    assert Rule("--kl-target", True, "needs more").problem(settings) == "--kl-target 0.1: needs more"
    assert Rule("--kl-target", True, "no", value="of a file").problem(settings) == "--kl-target of a file: no"


@pytest.mark.parametrize("argv, says", [
    (["--size", "a\0b"], "null characters"), (["--size=--"], "has no value"), (["--size", str(2**63)], "up to"),
    (["--size", "two"], "invalid int value"), (["--other"], "unrecognized"),
])  # fmt: skip
def test_the_parser_raises_for_values_that_argparse_would_let_pass(argv, says):
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", type=int)
    assert parser.parse_args(["--size", str(2**63 - 1)]).size == 2**63 - 1
    with pytest.raises(UsageError, match=says):
        parser.parse_args(argv)


@pytest.mark.parametrize("variables, said", [
    ({}, True), ({"RANK": "0", WARNED: ""}, True), ({"RANK": "1"}, False), ({"RANK": "0", WARNED: "1"}, False),
])  # fmt: skip
def test_what_all_ranks_find_is_said_once(variables, said, monkeypatch, capsys):
    for name in ("RANK", WARNED):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warn_as_first(["a\nb"])
    assert capsys.readouterr().err == "megarl: warning: a\\nb\n" * said
