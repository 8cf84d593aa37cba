"""megarl's own flags: each setting has one, with a line of help and an allowed range; hints for unknown ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.arguments import build_parser, parse
from megarl.errors import UsageError
from megarl.flags import parser
from megarl.flags.parser import MODULES, own_flags
from tests.helpers.flag_rules import MODEL, refused
from tests.helpers.pages.flag_cases import FIELDS, flag_of


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


ROOT = Path(__file__).parents[3]
CODE = "import sys; sys.argv = ['train_rl', *{argv}]; import megarl.train_rl as p; p.launch(p.train, 'rl')"
PRINTS = "; import atexit; atexit.register(lambda: print({'torch', 'megatron'} & {*sys.modules}))"


def test_the_table_is_that_of_the_installed_parser():
    """`tests/docs/test_reference.py` compares the file."""
    assert parser.megatron_options.__wrapped__() == parser.options_of_parser()
    assert len(parser.megatron_options().destinations) > 500


def test_with_another_version_the_parser_is_asked(monkeypatch, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"megatron-core": "0.19.99", "options": {"--lr": ["other", 1, 0]}}))
    monkeypatch.setattr(parser, "TABLE", tmp_path / "t.json")
    assert parser.megatron_options.__wrapped__() == parser.options_of_parser()


@pytest.mark.parametrize("argv, words", [
    (["--promptz", "x"], "did you mean --prompts?"), (["--critic-num-layerz", "2"], "-layerz: unknown flag"),
    (["--gamma", "3"], "--gamma 3.0: allowed is between 0 and 1"), (["--config", "nowhere.yaml"], "nowhere.yaml"),
    (["--rollout-lr", "1"], "the rollout runs the actor's model"),
    (["--group-filter", "reward", "--samples-per-prompt", "1"], "needs --samples-per-prompt 2 or more"),
    (["--role-map", "actor=0;critic=9"], "outside the world"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_without_torch(argv, words):
    code = "import sys" + PRINTS + "; " + CODE.format(argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "set()\n"
