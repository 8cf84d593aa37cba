"""megarl's own flags: each setting has one, with a line of help and an allowed range; hints for unknown ones."""

import dataclasses

import pytest

from megarl.arguments import Settings, build_parser, parse
from megarl.errors import UsageError
from megarl.flags.parser import MODULES, own_flags
from tests.helpers.flag_rules import MODEL, refused
from tests.helpers.pages.flag_cases import FIELDS, OUTSIDE, flag_of, required_flags, value_of


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_setting_is_a_flag(field):
    for program in field.metadata["programs"]:
        value = value_of(field)
        if (program, field.name) == ("evaluate", "role_map"):
            value = "actor=0;reward=2"
        parsed = parse([*MODEL, *required_flags(field, program), flag_of(field), str(value)], 4, program)
        settings = parsed.settings
        assert parsed.warnings == () and parsed.megarl_settings()[field.name] == value
        assert getattr(settings, field.name) == value != field.default
        assert type(getattr(settings, field.name)) is type(value)


@pytest.mark.parametrize("program, flag, hint", [
    ("sft", "--gamma", "; train_rl has --gamma"), ("sft", "--actor-gamma", "; train_rl has --gamma"),
    ("rl", "--preference-margin", "; train_reward, train_preference have --preference-margin"),
    ("serve", "--eval-temperature", "; train_rl, evaluate have --eval-temperature"),
    ("rl", "--num-layer", "; did you mean --num-layers?"), ("rl", "--learning-rate", "; did you mean --lr?"),
    ("rl", "--max-new-tokens", "; did you mean --max-response-length?"),
    ("rl", "--num_generations", "; did you mean --samples-per-prompt?"),
    ("rl", "--save_interval", "; did you mean --save-interval?"),
    ("rl", "--per_device_train_batch_size", "; docs/migrating.md has the names of verl, OpenRLHF and TRL"),
    ("rl", "--actor_rollout_ref.rollout.n", "; docs/migrating.md has the names of verl, OpenRLHF and TRL"),
    ("rl", "--lr-rate", ""), ("rl", "--fim-ratee", ""), ("sft", "--actor-prot", ""), ("rl", "--actor", ""),
    ("rl", "--clip-rang", "; did you mean --clip-range?"), ("rl", "--critic-gamma", "; did you mean --gamma?"),
])  # fmt: skip
def test_an_unknown_flag_leads_to_one_that_is_accepted(program, flag, hint):
    assert refused([flag, "1"], program=program) == f"{flag}: unknown flag{hint}"


@pytest.mark.parametrize("word", ["true", "false", "2"])
def test_a_word_after_a_switch_names_the_switch(word):
    line = f"actor: --sequence-parallel {word}: is a switch, which has no value: give it alone, or leave it out"
    assert refused(["--sequence-parallel", word], program="rl") == line


@pytest.mark.parametrize("program", ["rl", "sft", "reward", "evaluate", "serve"])
def test_every_suggestion_is_accepted(program):
    from megarl.flags.parser import ELSEWHERE
    from megarl.mcore.config import megatron_flags

    known = {field.name.replace("_", "-") for field in FIELDS} | {"hf-model"}
    known |= {option.removeprefix("--") for option in megatron_flags.accepted_options()}
    assert set(ELSEWHERE.values()) <= known
    misspelled = [option[:-1] + "q" for option in megatron_flags.destinations() if len(option) > 8]
    for option in misspelled[::23]:
        hint = refused([option, "1"], program=program).partition("did you mean ")[2].removesuffix("?")
        if hint:
            assert "does not use" not in outcome(hint, program), (option, hint)


def outcome(flag: str, program: str) -> str:
    """The error of a flag with the value 1; "" without one."""
    try:
        parse([*MODEL, flag, "1"], 1, program)
    except UsageError as error:
        return str(error)
    return ""


def test_a_flag_sets_its_own_field_alone():
    chosen = dataclasses.replace(Settings(), gamma=0.5, top_k=3, advantage="reinforce++")
    assert parse([*MODEL, *"--gamma 0.5 --top-k 3 --advantage reinforce++".split()], 4).settings == chosen


def test_a_switch_needs_no_value():
    assert parse([*MODEL, "--deterministic"], 1).settings.deterministic is True
    assert parse([*MODEL, "--whiten-advantages", "false"], 1).settings.whiten_advantages is False


def test_help_has_a_line_for_every_setting():
    texts = {program: build_parser(program).format_help() for program in MODULES}
    for field in FIELDS:
        for program, text in texts.items():
            assert (flag_of(field) + " " in text) == (program in field.metadata["programs"]), (flag_of(field), program)
        program = field.metadata["programs"][0]
        text = own_flags(program)[field.name.replace("_", "-")].text
        assert text and text.split()[0] in texts[program]
    modules = [text.split()[1] for text in texts.values()]
    assert modules == [f"megarl.{name}" for name in MODULES.values()]


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
