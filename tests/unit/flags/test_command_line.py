"""Command lines with config files: their order, what they set, and keys of another program."""

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from tests.helpers.flag_rules import MODEL, from_configs


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
