"""Combinations of flags: roles of a run, flags without effect, and rules, each of which can be broken alone."""

import ast
import dataclasses
from pathlib import Path

import pytest

from megarl.algorithms import ESTIMATORS
from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.flags import combinations
from megarl.flags.conditions import CRITIC, FlagContext
from megarl.flags.settings import TOPICS
from tests.helpers.models.tiny_models import SHAPES
from tests.helpers.pages.flag_cases import (
    CONTEXT,
    FAILS,
    FIELDS,
    HOLDS,
    ONLINE,
    condition_of,
    flag_of,
    named_conditions,
    value_of,
)

MODEL = SHAPES["llama"].split()
MINIMAL = dict.fromkeys(ESTIMATORS, "") | {"remax": "--greedy-baseline", "preference": ONLINE, "none": "--distill loss",
                                           "gdpo": "--kl-in loss"}  # fmt: skip


def parsed(flags: str, program: str = "rl", size: int = 4):
    return parse([*MODEL, *flags.split()], size, program)


def refused(flags: str, program: str = "rl") -> str:
    with pytest.raises(UsageError) as caught:
        parsed(flags, program)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


# -- flags without effect ----------------------------------------------------------------------------------------


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


# -- rules -------------------------------------------------------------------------------------------------------

WRONG = {
    "parts of a conversation": (
        "--prompt-column a --messages-column b", "--prompt-column a: not allowed with --messages-column", "sft"),
    "responses of a conversation": (
        "--response-column a --messages-column b", "--response-column a: not allowed with --messages-column", "sft"),
    "advantages of examples": ("--distill reward --teacher-hf-model x", "--distill reward: adds to advantages", "sft"),
    "an average of examples": ("--distill loss --teacher ema", "--teacher ema: only in train_rl", "sft"),
    "weights beside a server": ("--rollout-server http://a:1 --load x", "--load x: the server of", "evaluate"),
    "the name of the terms": ("--eval-prompts x --evals reward=y", "--evals reward: metrics eval/reward/… are"),
    "a loss that is never known": ("--target-eval-loss 1", "--target-eval-loss 1.0: needs --eval-interval", "sft"),
    "an accuracy that is never known": (
        "--target-eval-accuracy 0.9", "--target-eval-accuracy 0.9: needs --eval-interval", "reward"),
    "no reward model": ("--reward model+format", "--reward model+format: needs --reward-model"),
    "baseline in other units": ("--reward model --reward-model x --reward-clip 2 --advantage remax --greedy-baseline",
                                "--greedy-baseline True: uses raw scores"),
    "two models of one role": ("--reward model+judge --reward-model x --judge-config y --judge-load z",
                               "--reward model+judge: the reward role runs one model"),
    "a judge without a file": ("--reward judge --judge-load x", "--reward judge: needs --judge-config"),
    "a judge without weights": ("--reward judge --judge-config x", "--reward judge: needs --judge-hf-model or "),
    "rewards of no environment": ("--reward 0.5*environment", "--reward 0.5*environment: needs --environment"),
    "thoughts": ("--environment x:y --advantage rloo --credit turns --thinking-budget 9", "--thinking-budget 9"),
    "turns against whole episodes": ("--environment x:y --advantage grpo --credit turns", "--credit turns: needs --ad"),
    "the clock and turns": ("--environment x:y --over-sampling 2 --generation-lag 1 --rollout-correction tis --save w"
                            " --generation-schedule recorded", "--environment x:y: not allowed with --over-sampling"),
    "a long turn": ("--environment x:y --max-turn-length 65 --max-response-length 64", "--max-turn-length 65: allow"),
    "rewards that do not count": ("--reward 0*exact-match", "--reward 0*exact-match: every weight is 0; at least one"),
    "nothing to learn from": ("--reward none", "--reward none: needs --distill"),
    "no advantage": ("--advantage none", "--advantage none: needs --distill"),
    "an estimator of nothing": ("--distill loss --advantage grpo", "--advantage grpo: no reward counts"),
    "a reward that is left out": ("--distill loss --reward format --advantage none", "--advantage none: leaves out what"
                                  " --reward format says"),
    "a KL that is left out": ("--distill loss --kl-coefficient 0.1", "--advantage none: leaves out the KL"),
    "groups without rewards": ("--distill loss --group-filter reward", "--group-filter reward: no reward counts"),
    "an average of nothing": ("--distill loss --teacher ema", "--teacher ema: needs --ema-decay"),
    "an average ahead of itself": ("--distill loss --teacher ema --ema-decay 0.9 --generation-lag 1"
                                   " --rollout-correction tis", "--teacher ema: needs --generation-lag 0"),
    "folders of a start": ("--distill loss --teacher self --teachers a=b", "--teachers a=b: names the teachers' folde"),
    "a response alone": (CONTEXT.replace("grpo --samples-per-prompt 4", "reinforce++ --samples-per-prompt 1"),
                         "--teacher-context sibling: needs --samples-per-prompt 2 or more"),
    "siblings without rewards": (CONTEXT.replace("--reward exact-match --advantage grpo", ""),
                                 "--teacher-context sibling: needs a --reward that says which responses are correct"),
    "no room for a sibling": (CONTEXT.replace("9000", "512"), "--teacher-context sibling: needs --teacher-max-prompt"),
    "siblings of an environment": (f"{CONTEXT.replace('exact-match', 'environment')} --environment x:y",
                                   "--teacher-context sibling: not allowed with --environment"),
    "an evaluation of nothing": ("--distill loss --eval-prompts x", "--eval-prompts x: needs a --reward that measures"),
    "no pattern": ("--reward regex", "--reward regex: needs --reward-pattern"),
    "no address": ("--reward 0.5*remote", "--reward 0.5*remote: needs --reward-url"),
    "the mean of one": ("--reward exact-match+adaptive-length --samples-per-prompt 1", "--samples-per-prompt 1: adap"),
    "pools of single responses": ("--pool-bounds 0.1,0.9 --samples-per-prompt 1", "--pool-bounds 0.1,0.9: needs --sam"),
    "pools without a reward": ("--distill loss --pool-bounds 0.1,0.9", "--pool-bounds 0.1,0.9: needs a --reward that"),
    "pools of saved responses": ("--pool-bounds 0.1,0.9 --debug-train-only --load-rollouts x",
                                 "--pool-bounds 0.1,0.9: not allowed with --debug-train-only"),
    "large mini-batch": ("--minibatch-size 65", "--minibatch-size 65: allowed is at most --prompts-per-step × --sam"),
    "filter of single responses": ("--group-filter reward --samples-per-prompt 1", "--group-filter reward: needs --s"),
    "nothing to fill up": ("--dynamic-sampling", "--dynamic-sampling True: needs --group-filter"),
    "a bank without checkpoints": ("--rollout-bank x", "--rollout-bank x: needs --save"),
    "parts of nothing": ("--partial-rollouts", "--partial-rollouts True: needs --over-sampling above 1"),
    "parts without correction": ("--partial-rollouts --over-sampling 2", "--partial-rollouts True: needs a --rollout"),
    "penalty longer than a response": ("--overlong-buffer 9 --max-response-length 8", "--overlong-buffer 9: allowed is "
                                       "at most --max-response-length 8"),
    "older than the lag allows": ("--generation-lag 3 --over-sampling 2 --partial-rollouts --rollout-correction tis"
                                  " --max-staleness 2", "--max-staleness 2: allowed is 0, or at least --generation-l"),
    "a choice of one": ("--generation-schedule recorded --save x", "--generation-schedule recorded: needs --generati"),
    "a schedule nowhere": ("--generation-schedule recorded --generation-lag 1", "--generation-schedule recorded: need"),
    "a schedule and the clock": ("--generation-schedule recorded --generation-lag 1 --save x --replay-schedule y",
                                 "--generation-schedule recorded: not allowed with --replay-schedule"),
    "a schedule without a choice": ("--replay-schedule x", "--replay-schedule x: needs the --generation-lag of the"),
    "a bank of several policies": ("--replay-schedule x --generation-lag 1 --rollout-bank y --save z",
                                   "--rollout-bank y: keeps responses of one policy"),
    "group of one": ("--advantage grpo --samples-per-prompt 1", "--samples-per-prompt 1: --advantage grpo compares"),
    "no baseline": ("--advantage remax", "--advantage remax: needs --greedy-baseline"),
    "pairs without labels": (f"{ONLINE} --preference-loss kto", "--preference-loss kto: reads single responses; allowed"
                             " with --advantage preference are dpo, ipo, simpo, orpo, rpo"),
    "pairs and ratios": (f"{ONLINE} --policy-loss ppo-clip", "--policy-loss ppo-clip: --advantage preference needs"),
    "pairs and means": (f"{ONLINE} --loss-aggregation token-mean", "--loss-aggregation token-mean: --advantage prefer"),
    "a second update on pairs": (f"{ONLINE} --minibatch-size 32", "--advantage preference: is the gradient before the"),
    "rewards with a KL": (f"{ONLINE} --kl-in reward", "--advantage preference: compares rewards without a KL; needs"),
    "weighted pairs": (f"{ONLINE} --rollout-correction tis", "--rollout-correction tis: --advantage preference needs"),
    "half a pair": (f"{ONLINE} --mask-truncated-responses", "--mask-truncated-responses True: not allowed with --adva"),
    "gradient of a reward": ("--kl-estimator k3+", "--kl-estimator k3+: needs --kl-in loss"),
    "no target": ("--kl-controller adaptive", "--kl-controller adaptive: needs --kl-target"),
    "short horizon": ("--kl-controller adaptive --kl-target 1 --kl-horizon 12.8", "--kl-horizon 12.8: allowed is more "
                      "than 0.2 × 64 responses"),
    "icepop without floor": ("--rollout-correction icepop", "--rollout-correction icepop: needs --rollout-correc"),
    "icepop of responses": ("--rollout-correction icepop --rollout-correction-floor 0.5 --rollout-correction-level "
                            "sequence", "--rollout-correction icepop: masks single tokens"),
    "truncated means": ("--rollout-correction tis --rollout-correction-level geometric", "--rollout-correction tis: "),
    "floor above cap": ("--rollout-correction icepop --rollout-correction-floor 3", "--rollout-correction-floor 3.0: al"
                        "lowed is at most --rollout-correction-cap 2.0"),
    "weights of a loss with weights": ("--policy-loss rollout-is --rollout-correction tis",
                                       "--rollout-correction tis: would weigh twice: --policy-loss rollout-is"),
    "weights of 1": ("--old-logprobs rollout --rollout-correction mis", "--rollout-correction mis: weighs by π_old/μ"),
    "interpolation of fresh tokens": ("--old-logprobs interpolate", "--old-logprobs interpolate: moves tokens of"),
    "routes of no pass": ("--old-logprobs rollout --router-replay old-logprob", "--old-logprobs rollout: has no pass"),
    "nothing to mask": ("--policy-loss m2po --old-logprobs rollout", "--old-logprobs rollout: leaves nothing to mask"),
    "comparison of one": ("--policy-loss real --samples-per-prompt 1", "--policy-loss real: compares the responses of"),
    "half a group": ("--policy-loss real --minibatch-size 6", "--minibatch-size 6: would split groups, whose response"),
    "classes that move": ("--generation-lag 1 --policy-loss real --old-logprobs interpolate",
                          "--old-logprobs interpolate: changes between the updates"),
    "classes of a teacher": ("--policy-loss real --distill reward", "--distill reward: adds to the advantages, of"),
    "rejection without a pass": ("--old-logprobs rollout --rollout-rejection mean-abs=0.1",
                                 "--rollout-rejection mean-abs=0.1: compares the rollout with the policy before"),
    "preferences without a pass": (f"{ONLINE} --old-logprobs rollout", "--old-logprobs rollout: --advantage"),
    "probabilities without a pass": ("--advantage otb --old-logprobs rollout", "--advantage otb: reads Σπ² over the"),
    "parts and a KL": ("--advantage gdpo --reward exact-match+length", "--kl-in reward: --advantage gdpo compares"),
    "rejected pairs": (f"{ONLINE} --rollout-rejection mean-abs=0.1", "--rollout-rejection mean-abs=0.1: not allowed"),
    "routes without reference": ("--router-replay rollout --router-replay-reference --kl-coefficient 0",
                                 "--router-replay-reference True: the run has no reference"),
    "equal responses": ("--eval-prompts x --eval-responses 2", "--eval-responses 2: needs --eval-temperature above 0"),
    "export of factors to nowhere": ("--export-peft", "--export-peft True: needs --save"),
    "export to nowhere": ("--export-hf", "--export-hf True: needs --save"),
    "large k": ("--eval-prompts x --eval-k 1,2", "--eval-k 1,2: allowed is at most --eval-responses 1"),
    "nothing to train on": ("--debug-train-only", "--debug-train-only True: needs --load-rollouts"),
    "responses twice": ("--load-rollouts x", "--load-rollouts x: needs --debug-train-only"),
    "neither half": ("--debug-train-only --load-rollouts x --debug-rollout-only",
                     "--debug-rollout-only True: not allowed with --debug-train-only"),
    "server without engine": ("--debug-train-only --load-rollouts x --serve-policy",
                              "--serve-policy True: not allowed with --debug-train-only"),
    "rollouts nowhere": ("--save-rollouts", "--save-rollouts True: needs --save"),
    "rollouts copied": ("--debug-train-only --load-rollouts x --save-rollouts --save y",
                        "--save-rollouts True: not allowed with --debug-train-only"),
    "profile nowhere": ("--profile-steps 2", "--profile-steps 2: needs --save"),
    "sessions of an environment": ("--agent-sessions --environment x:y", "--agent-sessions True: drivers outside of "),
    "no turn of its own": ("--environment x:y --branch-turns 3 --max-turns 3", "--branch-turns 3: leaves an episode"),
    "a single branch": ("--environment x:y --branch-turns 1 --branch-samples 4", "--branch-samples 4: allowed is less"),
    "two servers": ("--agent-sessions --serve-policy --branch-turns 1", "--agent-sessions True: not allowed with --se"),
}  # fmt: skip
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


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    flags, needle, *program = WRONG[case]
    assert refused(flags, *program).startswith(needle)


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


def test_each_rule_can_be_broken(monkeypatch):
    """Every rule is the one that stops some case of the table: none is covered by those before it."""
    stopped, rules, sources = set(), combinations.rules, [Path(topic.__file__).read_text() for topic in TOPICS]

    def recorded(run):
        place = next(filter(None, (_stopped(topic.rules(run)) for topic in TOPICS)), None)
        stopped.add(place or next(rules(run)).flag)  # a flag that needs another one
        return rules(run)

    monkeypatch.setattr(combinations, "rules", recorded)
    for flags, _, *program in WRONG.values():
        refused(flags, *program)
    number = sum(isinstance(node, ast.Yield) for source in sources for node in ast.walk(ast.parse(source)))
    needs = sum(field.metadata["needs"] is not None for field in FIELDS)
    assert len(stopped) == number + needs == len(WRONG)


def _stopped(rules) -> tuple[str, int] | None:
    """The place of the first rule that is broken."""
    if next(rules, None) is None:
        return None
    inner = rules  # `rules` itself must live on, or it is closed
    while inner.gi_yieldfrom is not None:
        inner = inner.gi_yieldfrom
    return inner.gi_code.co_filename, inner.gi_frame.f_lineno


def test_reasons_read_settings_that_exist():
    case = FlagContext(
        "rl", dataclasses.replace(parsed("").settings, advantage="mine"), (), ESTIMATORS["grpo"], None, ()
    )
    assert CRITIC.why_not(case) == "--advantage mine needs no critic"
    assert all("{" not in condition.reason.format_map(vars(case.settings)) for condition in named_conditions())
