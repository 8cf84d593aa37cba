"""All topics together: roles of a run, combinations that are allowed, and that a flag sets its setting alone."""

import dataclasses

import pytest

from megarl.algorithms import ESTIMATORS
from megarl.arguments import Settings, parse
from tests.helpers.flag_rules import MODEL, parsed, refused
from tests.helpers.pages.flag_cases import FIELDS, ONLINE, flag_of, required_flags, value_of

MINIMAL = dict.fromkeys(ESTIMATORS, "") | {"remax": "--greedy-baseline", "preference": ONLINE, "none": "--distill loss",
                                           "gdpo": "--kl-in loss"}  # fmt: skip


# -- roles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, expected", [
    ("", "actor critic reward reference rollout"),
    ("--kl-coefficient 0", "actor critic reward rollout"),
    ("--advantage grpo", "actor reward reference rollout"),
    ("--advantage grpo --kl-coefficient 0", "actor reward rollout"),
    ("--advantage grpo --kl-coefficient 0 --role-map actor=0;reward=1;reference=2", "actor reward reference rollout"),
    ("--kl-coefficient 0 --role-map actor=0;reward=1;critic=2-3", "actor critic reward rollout"),
    ("--distill loss", "actor reward teacher rollout"),
    ("--distill reward --reward exact-match", "actor critic reward reference teacher rollout"),
    (f"{ONLINE} --kl-coefficient 0", "actor reward reference rollout"),
    (f"{ONLINE} --kl-coefficient 0 --preference-loss simpo", "actor reward rollout"),
])  # fmt: skip
def test_a_run_has_the_roles_that_it_needs(flags, expected):
    roles = parsed(flags).roles
    assert sorted(roles) == sorted(expected.split())
    if "--role-map" not in flags:
        assert list(roles) == expected.split() and all(role.ranks == range(4) for role in roles.values())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_and_only_those_that_need_values_have_a_critic(name):
    program = parsed(f"--advantage {name} {MINIMAL[name]}")
    assert program.estimator is ESTIMATORS[name]
    assert ("critic" in program.roles) == ("values" in ESTIMATORS[name].needs)


def test_evaluation_has_neither_critic_nor_reference():
    program = parsed("--eval-prompts x --eval-temperature 1 --eval-responses 4 --eval-k 1,4 --top-k 3", "evaluate")
    assert list(program.roles) == ["actor", "reward", "rollout"]
    assert list(parsed("--role-map actor=0-1;reward=2;rollout=3", "evaluate").roles) == ["actor", "reward", "rollout"]
    for flag in ("--gamma", "--prompts", "--train-iters", "--temperature", "--max-tokens-per-microbatch"):
        line = refused(f"{flag} 1", "evaluate")
        assert flag in line and ("unknown flag" in line or "does not use" in line)
    assert "'critic' is no role" in refused("--role-map actor=0;reward=1;critic=2", "evaluate")


def test_a_map_with_a_critic_that_nothing_needs():
    line = refused("--advantage rloo --role-map actor=0;critic=1;reward=2;reference=3")
    assert line.endswith("'critic' has nothing to do: --advantage rloo needs no critic; leave it out")


def test_a_map_without_a_reference_that_the_kl_needs():
    assert "no ranks for reference" in refused("--advantage rloo --role-map actor=0;reward=2")


# -- rules -------------------------------------------------------------------------------------------------------

RIGHT = [
    "--reward model+0*reasoning-gym --reward-model a,b --reward-ensemble min --reward-normalize --reward-clip 5"
    " --reward-tokenizer-model x --reward-chat-template tokenizer --reward-num-layers 3 --reward-offload",
    "--reward regex+0.5*remote+length --reward-pattern x --reward-url http://x --reward-timeout 3 --reward-workers 2",
    "--advantage gae --dual-clip 3 --minibatch-size 64 --critic-warmup-steps 3 --critic-lr 1e-3",
    "--advantage grpo --kl-in loss --kl-estimator k3+ --samples-per-prompt 2",
    "--advantage grpo --group-std false --kl-coefficient 0 --loss-aggregation seq-mean-token-sum-norm"
    " --loss-norm-length 512",
    "--advantage grpo --kl-coefficient 0 --clip-range-high 0.28 --group-filter correct --dynamic-sampling"
    " --max-sampling-rounds 3 --overlong-buffer 512 --overlong-penalty 0.5",
    "--advantage rloo --policy-loss reinforce", "--advantage opo --policy-loss cispo",
    "--advantage reinforce++ --samples-per-prompt 1 --gamma 0.99", "--advantage reinforce++-baseline",
    "--advantage remax --greedy-baseline --samples-per-prompt 1", "--rollout-correction-level sequence",
    f"{ONLINE} --preference-loss rpo --preference-beta 0.2 --preference-coefficient 0.5",
    f"{ONLINE} --preference-loss simpo --preference-gamma 0.3 --samples-per-prompt 2",
    "--environment x:y --advantage rloo --credit turns --max-turns 3 --reward environment+0.1*format",
    "--environment x:y --branch-turns 2 --branch-samples 3 --max-turns 3",
    "--environment x:y --over-sampling 1.5 --partial-rollouts --max-staleness 2 --rollout-correction tis",
    "--policy-loss real --minibatch-size 8 --samples-per-prompt 4 --old-logprobs rollout --advantage grpo",
    "--policy-loss gspo --clip-range 3e-4 --clip-range-high 4e-4", "--generation-lag 1 --rollout-correction tis",
    "--generation-lag 2 --generation-schedule recorded --save x --rollout-correction tis", "--policy-loss gmpo",
    "--generation-lag 2 --replay-schedule x --rollout-correction tis",
    "--over-sampling 1.5 --partial-rollouts --max-staleness 2 --rollout-correction icepop"
    " --rollout-correction-floor 0.5 --group-filter reward --dynamic-sampling --router-replay rollout",
    "--rollout-correction tis --rollout-correction-level sequence",
    "--old-logprobs rollout --policy-loss rollout-is --router-replay rollout",
    "--generation-lag 1 --old-logprobs interpolate", "--over-sampling 2 --partial-rollouts --policy-loss vespo",
    "--rollout-rejection mean-abs=0.1 token-k1=0.5:2 --rollout-correction tis --rollout-correction-normalize",
    "--rollout-correction mis --rollout-correction-level geometric --rollout-correction-cap 1.01",
    "--rollout-correction icepop --rollout-correction-floor 0.5 --rollout-correction-cap 5",
    "--kl-controller adaptive --kl-target 1 --kl-horizon 12.9", "--reference-update-interval 2 --reference-mixup 0.5",
    "--router-replay rollout --router-replay-reference --router-probe-interval 5", "--router-replay old-logprob",
    "--debug-train-only --load-rollouts x --generation-lag 1 --rollout-correction tis", "--debug-rollout-only",
    "--router-replay rollout --router-replay-reference --debug-rollout-only", "--save y --save-rollouts",
    "--eval-prompts x --eval-interval 2 --save y --keep-best false --eval-responses 8 --eval-temperature 1 --eval-k 8",
]  # fmt: skip


@pytest.mark.parametrize("program", ["rl", "evaluate"])
def test_an_environment_rewards_its_episodes_unless_another_reward_is_given(program):
    given = "--eval-prompts x" if program == "evaluate" else ""
    assert parsed(given, program).settings.reward == "exact-match"
    found = parsed(f"{given} --environment x:y", program)
    assert found.settings.reward == "environment" and found.rewards == ((1.0, "environment"),)
    for reward in ("exact-match", "format+2*environment"):
        assert parsed(f"{given} --environment x:y --reward {reward}", program).settings.reward == reward


def test_flags_of_verifiers_need_more_than_an_environment():
    found = parsed("--environment x:y --reward-timeout 3 --reward-workers 2")
    assert found.warnings == (
        "without effect: --reward-timeout (--reward environment has neither a verifier nor a judge);"
        " --reward-workers (--reward environment has no verifier that runs locally)",
    )


@pytest.mark.parametrize("name", [name for name, e in ESTIMATORS.items() if "groups" in e.needs])
def test_group_estimators_need_groups(name):
    assert refused(f"--advantage {name} --samples-per-prompt 1").startswith("--samples-per-prompt 1: ")


@pytest.mark.parametrize("flags", RIGHT)
def test_right_combinations(flags):
    assert parsed(flags).warnings == ()


# -- fields ------------------------------------------------------------------------------------------------------


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
