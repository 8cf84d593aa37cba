"""Each setting is a flag, and a flag sets its setting alone."""

import dataclasses

import pytest

from megarl.arguments import Settings, parse
from tests.helpers.flag_rules import MODEL
from tests.helpers.pages.flag_cases import FIELDS, flag_of, required_flags, value_of


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


def test_a_flag_sets_its_own_field_alone():
    chosen = dataclasses.replace(Settings(), gamma=0.5, top_k=3, advantage="reinforce++")
    assert parse([*MODEL, *"--gamma 0.5 --top-k 3 --advantage reinforce++".split()], 4).settings == chosen


def test_a_switch_needs_no_value():
    assert parse([*MODEL, "--deterministic"], 1).settings.deterministic is True
    assert parse([*MODEL, "--whiten-advantages", "false"], 1).settings.whiten_advantages is False
