"""Command lines with config files: their order, what they set, keys of another program, null, one-line errors."""

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from tests.helpers.flag_rules import MODEL, from_configs
from tests.helpers.texts.refusals import refusal


def test_a_program_knows_what_the_user_set_and_how_it_was_started(tmp_path):
    text = "critic-weight-decay: 0.3\nclip-range: 0.3\nprompts: a.jsonl\nqk-layernorm: false\nbf16: true\nseed: null\n"
    argv = ["--gamma=0.25", "--critic-max-tokens-per-microbatch", "2000", "--no-rope-fusion"]
    found = from_configs(tmp_path, text, argv=argv)
    config = ["--config", str(tmp_path / "0.yaml")]
    assert found.command_line == ("megarl.train_rl", *MODEL, *config, *argv)
    without = parse(MODEL, 1)
    added = {
        section: sorted({*names} - {*without.user_settings[section]}) for section, names in found.user_settings.items()
    }
    assert added == {
        "megarl": ["clip_range", "critic_max_tokens_per_microbatch", "gamma", "prompts"],
        "megatron": ["apply_rope_fusion", "bf16", "critic_weight_decay", "qk_layernorm"],
    }
    assert "num_layers" in without.user_settings["megatron"] and without.command_line == ("megarl.train_rl", *MODEL)


def test_a_config_file_before_or_after_the_flags_is_the_same(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("gamma: 0.5\n")
    config = ["--config", str(path)]
    assert parse([*MODEL, *config, "--gamma", "0.25"], 1).settings.gamma == 0.25
    assert parse([*MODEL, "--gamma", "0.25", *config], 1).settings.gamma == 0.25


def test_files_may_come_by_several_flags(tmp_path):
    for name, text in (("a", "seed: 3\ngamma: 0.5\n"), ("b", "seed: 4\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    settings = parse([*MODEL, "--config", f"{tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"], 1).settings
    assert (settings.seed, settings.gamma) == (4, 0.5)


TRAINING = "ppo-epochs: 2\ncritic-lr: 1.0e-3\nprompts: p.jsonl\npretrained-checkpoint: sft\ngamma: 0.5\n"


def test_an_evaluation_takes_the_file_of_a_run(tmp_path):
    """Training keys of a file are ignored; on the command line they are rejected, and so are unknown keys."""
    text = TRAINING + "eval-responses: 2\neval-temperature: 0.5\nweight-decay: 0.3\nlr: 1\n"
    found = from_configs(tmp_path, text, program="evaluate")
    assert found.settings.eval_responses == 2 and found.roles["actor"].megatron.pretrained_checkpoint is None
    for flag in ("--ppo-epochs", "--critic-lr", "--gamma"):
        with pytest.raises(UsageError, match=f"{flag}: unknown flag"):
            from_configs(tmp_path, text, argv=[flag, "1"], program="evaluate")
    with pytest.raises(UsageError, match="--ppo-epoch: unknown flag"):
        from_configs(tmp_path, "ppo-epoch: 2\n", program="evaluate")
    with pytest.raises(UsageError, match="--target-eval-loss: unknown flag"):
        from_configs(tmp_path, "target-eval-loss: 2\n", program="rl")


def error_of(tmp_path, *texts: str) -> str:
    return refusal(from_configs, tmp_path, *texts)


def test_a_config_file_holds_the_same_names_and_the_command_line_wins(tmp_path):
    text = "weight-decay: 0.2\ncritic-weight-decay: 0.3\ngamma: 0.5\nclip-range: 0.3\nprompts: a b.jsonl\n"
    program = from_configs(tmp_path, text, argv=["--gamma", "0.25", "--critic-weight-decay", "0.4"])
    assert (program.settings.gamma, program.policy_loss.options.low) == (0.25, 0.3)
    assert program.settings.prompts == "a b.jsonl"
    assert program.roles["critic"].megatron.weight_decay == 0.4
    assert program.roles["actor"].megatron.weight_decay == 0.2


def test_yaml_bools_set_own_switches_both_ways_and_megatrons_by_naming_them(tmp_path):
    text = "whiten-advantages: false\ndeterministic: true\nqk-layernorm: true\nadd-qkv-bias: false\n"
    program = from_configs(tmp_path, text)
    assert program.settings.whiten_advantages is False and program.settings.deterministic is True
    assert program.roles["actor"].megatron.qk_layernorm is True
    assert program.roles["actor"].megatron.add_qkv_bias is False


# -- several files -----------------------------------------------------------------------------------------------

BASE = "gamma: 0.5\nseed: 3\nweight-decay: 0.2\nqk-layernorm: true\ncritic-weight-decay: 0.3\n"


def test_later_files_win_and_the_command_line_over_all(tmp_path):
    program = from_configs(tmp_path, BASE, "gamma: 0.25\nseed: 4\n", "seed: 5\nweight-decay: 0.1\n")
    assert (program.settings.gamma, program.settings.seed) == (0.25, 5)
    assert program.roles["actor"].megatron.weight_decay == 0.1
    assert program.roles["critic"].megatron.weight_decay == 0.3
    assert from_configs(tmp_path, BASE, "seed: 4\n", argv=["--seed", "6"]).settings.seed == 6


@pytest.mark.parametrize("null", ["null", "~", "Null"])
def test_null_unsets_a_key(tmp_path, null):
    taken = "".join(f"{line.split(':')[0]}: {null}\n" for line in BASE.splitlines())
    program = from_configs(tmp_path, BASE, taken)
    assert program.settings == parse(MODEL, 4).settings
    assert vars(program.roles["critic"].megatron) == vars(parse(MODEL, 4).roles["critic"].megatron)
    assert from_configs(tmp_path, BASE, taken, "seed: 5\n").settings.seed == 5
    assert from_configs(tmp_path, taken).settings.seed == 1  # nothing there to take back


def test_a_later_file_turns_a_switch_off(tmp_path):
    assert from_configs(tmp_path, BASE, "qk-layernorm: false\n").roles["actor"].megatron.qk_layernorm is False


def test_an_unset_key_must_still_exist(tmp_path):
    assert error_of(tmp_path, BASE, "gama: null\n") == "--gama: unknown flag; did you mean --gamma?"
    assert "--critic-gamma: unknown flag" in error_of(tmp_path, "critic-gamma: null\n")
    with pytest.raises(UsageError, match="--gamma: unknown flag"):
        from_configs(tmp_path, "gamma: null\n", program="sft")


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, says", [
    ("no-such-flag: 1", "--no-such-flag"),
    ("no-such-flag: false", "no-such-flag"),
    ("critic-no-such-flag: false", "critic-no-such-flag"),
    ("config: other.yaml", "config"), ("check: true", "check"),
    ("gamma:", "gamma: has no value; write null"),
    ("seed: 1\nseed: 2", "seed: appears twice"),
    ("gamma: {a: 1}", "gamma"),
    ("gamma: 2", "--gamma 2.0"),
    ("gamma: much", "--gamma"),
    ("whiten-advantages: maybe", "true or false"),
    ("[1, 2]", "mapping"),
    ("", "mapping"),
    ("a: [", "not YAML"),
    ("? [a]\n: 1", "not YAML"),
    ("prompts: [a, b]", "'b'"),
])  # fmt: skip
def test_wrong_config_files_are_rejected(tmp_path, text, says):
    assert says in error_of(tmp_path, text)
    assert says in error_of(tmp_path, "max-prompt-length: 9\n", text)


def test_an_error_names_the_file(tmp_path):
    assert error_of(tmp_path, BASE, "gamma:").startswith(f"--config {tmp_path}/1.yaml: ")


def test_unreadable_config_files_are_rejected(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    for name, says in (("missing.yaml", "missing.yaml: cannot be read"), ("binary.yaml", "not UTF-8")):
        with pytest.raises(UsageError, match=says):
            parse([*MODEL, "--config", str(tmp_path / name)], 1)
