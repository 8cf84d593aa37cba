"""Flags without effect, and the conditions that say why."""

import dataclasses

import pytest

from megarl.algorithms import ESTIMATORS
from megarl.flags.conditions import CRITIC, FlagContext
from tests.helpers.flag_rules import parsed, refused
from tests.helpers.pages.flag_cases import FAILS, FIELDS, HOLDS, condition_of, flag_of, named_conditions, value_of


def test_every_condition_is_used_and_tried():
    used = {condition_of(field) for field in FIELDS} - {None}
    assert used | {"CRITIC", "REFERENCE", "TEACHER", "SCORING_MODEL"} == set(HOLDS)
    assert {name for name in named_conditions().values() if ":" not in name} <= set(HOLDS)
    assert set(HOLDS) - set(FAILS) == {"SAMPLED"}  # it has its own test


@pytest.mark.parametrize("field", [f for f in FIELDS if condition_of(f) in FAILS], ids=lambda f: f.name)
def test_a_flag_without_effect_is_dropped_with_a_warning_even_at_its_default(field):
    program, when = field.metadata["programs"][0], condition_of(field)
    fails = "" if program == "sft" else FAILS[when]  # where there is no other form of distillation
    without = parsed(fails, program)
    for value in {value_of(field), field.default} - {None}:
        found = parsed(f"{fails} {flag_of(field)} {value}", program)
        assert len(found.warnings) == 1 and found.warnings[0].startswith(f"without effect: {flag_of(field)} (")
        assert found.settings == without.settings


def test_all_flags_without_effect_are_listed_in_one_line_with_reasons(tmp_path):
    (tmp_path / "c.yaml").write_text("gae-lambda: 0.9\ncritic-lr: 1.0e-3\nreference-num-layers: 3\n")
    flags = (
        f"--config {tmp_path}/c.yaml --advantage grpo --policy-loss gspo --kl-coefficient 0 --dual-clip 3 --kl-in loss"
        " --critic-max-tokens-per-microbatch 5 --critic-warmup-steps=2 --critic-tensor-model-parallel-size=2"
    )
    program = parsed(flags)
    assert program.warnings == (
        "without effect: --gae-lambda (--advantage grpo does not use them); --dual-clip (--policy-loss gspo does not"
        " use them); --kl-in (--kl-coefficient is 0); --critic-max-tokens-per-microbatch, --critic-warmup-steps,"
        " --critic-lr, --critic-tensor-model-parallel-size (--advantage grpo needs no critic); --reference-num-layers"
        " (--kl-coefficient is 0 and --role-map has no reference)",
    )
    plain = parsed("--advantage grpo --policy-loss gspo --kl-coefficient 0")
    assert (program.settings, program.policy_loss, program.roles) == (plain.settings, plain.policy_loss, plain.roles)


def test_a_flag_that_needs_one_without_effect_has_none():
    flags = "--debug-train-only --load-rollouts x --save y --evals a=x --eval-interval 1 --best-metric a/accuracy"
    program = parsed(flags)
    assert program.settings.best_metric is None and program.warnings == (
        "without effect: --evals, --eval-interval (--debug-train-only and --debug-rollout-only evaluate nothing);"
        " --best-metric (needs --eval-prompts, --eval-interval and --save)",
    )


def test_a_dropped_flag_breaks_no_rule():
    """A switch of another algorithm has no effect and is not rejected."""
    assert parsed("--advantage rloo --greedy-baseline --reward-normalize").settings.greedy_baseline is False
    partial = "--over-sampling 2 --partial-rollouts --rollout-correction tis"
    assert parsed("--generation-lag 2 --max-staleness 1 --rollout-correction tis").warnings
    assert refused(f"--generation-lag 2 --max-staleness 1 {partial}").startswith("--max-staleness 1")


def test_stale_responses_without_a_correction_are_warned_of():
    assert not parsed("--generation-lag 2 --rollout-correction tis").warnings
    (warning,) = parsed("--generation-lag 2").warnings
    assert warning.startswith("--generation-lag 2 without --rollout-correction: responses are up to 2 updates old")


def test_the_lag_is_limited():
    assert refused("--generation-lag 33") == "--generation-lag 33: allowed is 0 to 32"


def test_wrong_values_and_unknown_flags_are_rejected_even_without_effect():
    assert refused("--advantage grpo --gae-lambda 2").startswith("--gae-lambda 2.0: allowed is")
    assert refused("--policy-loss reinforce --dual-clip 1").startswith("--dual-clip 1.0: allowed is above 1")
    assert refused("--advantage grpo --critic-max-tokens-per-microbatch 0").startswith("--critic-max-tokens-per-micro")


def test_flags_of_an_absent_reward_model():
    flags = "--reward-num-layers 3 --reward-tensor-model-parallel-size 2 --reward-offload --reward-hidden-size=65"
    found = parsed(flags)
    assert found.warnings == (
        "without effect: --reward-offload, --reward-num-layers, --reward-hidden-size"
        " (--reward exact-match has neither model nor judge)",
    )
    args = found.roles["reward"].megatron
    assert (args.num_layers, args.hidden_size, args.tensor_model_parallel_size) == (2, 64, 2)
    assert not found.roles["reward"].offload
    assert "come from --reward-model" in refused("--reward-pretrained-checkpoint x")


def test_null_unsets_flags_without_effect(tmp_path):
    (tmp_path / "ppo.yaml").write_text(
        "gae-lambda: 0.9\ncritic-lr: 1.0e-3\ncritic-qk-layernorm: true\nweight-decay: 0.2\n"
    )
    (tmp_path / "grpo.yaml").write_text(
        "advantage: grpo\ngae-lambda: null\ncritic-lr: null\ncritic-qk-layernorm: false\ncritic-weight-decay: null\n"
    )
    program = parsed(f"--config {tmp_path}/ppo.yaml {tmp_path}/grpo.yaml")
    assert (
        not program.warnings
        and program.settings.advantage == "grpo"
        and program.roles["actor"].megatron.weight_decay == 0.2
    )


def test_an_unknown_flag_of_an_absent_role_is_unknown():
    assert "--critic-no-such-flag: unknown flag" in refused("--advantage grpo --critic-no-such-flag 1")


def test_sampling_flags_have_no_effect_on_greedy_evaluation():
    greedy = parsed("--top-k 3 --top-p 0.5", "evaluate")
    assert greedy.warnings == ("without effect: --top-k, --top-p (--eval-temperature 0 is greedy)",)
    assert not parsed("--top-k 3 --top-p 0.5 --eval-temperature 0.5", "evaluate").warnings
    assert not parsed("--top-k 3").warnings


def test_reasons_read_settings_that_exist():
    case = FlagContext(
        "rl", dataclasses.replace(parsed("").settings, advantage="mine"), (), ESTIMATORS["grpo"], None, ()
    )
    assert CRITIC.why_not(case) == "--advantage mine needs no critic"
    assert all("{" not in condition.reason.format_map(vars(case.settings)) for condition in named_conditions())
