"""Which flags go together: flags without effect in a run, and combinations that make no sense, each with its reason.

Both are data. A flag has an effect where its condition holds (`condition`); where it does not, the flag is dropped with
a warning. `rules` gives all rules, in one order, whatever the flags; a run that breaks one is refused.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from megarl.algorithms.estimators import AdvantageOptions, Estimator
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.errors import UsageError
from megarl.flags.settings import Settings, whole_numbers
from megarl.rewards.expression import Term


class FlagContext(NamedTuple):
    """A run as its flags describe it, before any model is built."""

    program: str
    settings: Settings
    roles: tuple[str, ...]
    estimator: Estimator
    policy_loss: PolicyLoss
    terms: tuple[Term, ...]  # of --reward

    @property
    def rewards(self) -> set[str]:
        """Names in `--reward`."""
        return {term.name for term in self.terms}


class Condition(NamedTuple):
    """When it holds, and why flags that need it have no effect where it does not; {fields} of the settings in it."""

    holds: Callable[[FlagContext], bool]
    reason: str


def _of_estimator(option: str) -> Condition:
    return Condition(lambda case: option in case.estimator.options, "--advantage {advantage} does not use them")


def _of_loss(flag: str) -> Condition:
    return Condition(lambda case: flag in case.policy_loss.flags(), "--policy-loss {policy_loss} does not use them")


def _verifier(name: str) -> Condition:
    return Condition(lambda case: name in case.rewards, f"--reward {{reward}} has no {name}")


def _adapts(settings: Settings) -> bool:
    return settings.kl_controller == "adaptive" and settings.kl_coefficient > 0


CONDITIONS: dict[str, Condition] = {
    **{f"estimator:{option.name}": _of_estimator(option.name) for option in dataclasses.fields(AdvantageOptions)},
    **{name: _verifier(name) for name in ("regex", "format", "length", "code", "remote")},
    "model": Condition(lambda case: case.program == "reward" or "model" in case.rewards,
                       "--reward {reward} has no model"),
    "ensemble": Condition(lambda case: "model" in case.rewards and "," in (case.settings.reward_model or ""),
                          "only with several folders in --reward-model"),
    "verifiers": Condition(lambda case: bool(case.rewards - {"model"}),
                           "--reward {reward} has no verifier"),
    "local": Condition(lambda case: bool(case.rewards - {"model", "remote"}),
                       "--reward {reward} has no verifier that runs here"),
    "critic": Condition(lambda case: "critic" in case.roles, "--advantage {advantage} needs no critic"),
    "reference": Condition(lambda case: "reference" in case.roles,
                           "--kl-coefficient is 0 and --role-map has no reference"),
    "baselines": Condition(lambda case: "baselines" in case.estimator.needs,
                           "--advantage {advantage} needs no greedy responses"),
    "norm": Condition(lambda case: case.settings.loss_aggregation == "seq-mean-token-sum-norm",
                      "only with --loss-aggregation seq-mean-token-sum-norm"),
    "kl": Condition(lambda case: case.settings.kl_coefficient > 0, "--kl-coefficient is 0"),
    "adaptive": Condition(lambda case: _adapts(case.settings),
                          "only with --kl-controller adaptive and --kl-coefficient above 0"),
    "correction": Condition(lambda case: case.settings.rollout_correction != "none", "--rollout-correction is none"),
    "icepop": Condition(lambda case: case.settings.rollout_correction == "icepop",
                        "only with --rollout-correction icepop"),
    "routes": Condition(lambda case: case.settings.router_replay == "rollout", "only with --router-replay rollout"),
    "rounds": Condition(lambda case: case.settings.dynamic_sampling, "only with --dynamic-sampling"),
    "partial": Condition(lambda case: case.settings.partial_rollouts, "only with --partial-rollouts"),
    "overlong": Condition(lambda case: case.settings.overlong_buffer > 0, "--overlong-buffer is 0"),
    "sampled": Condition(lambda case: case.program != "evaluate" or case.settings.eval_temperature > 0,
                         "--eval-temperature 0 is greedy"),
    "evaluation": Condition(lambda case: case.program == "evaluate" or case.settings.eval_prompts is not None,
                            "only with --eval-prompts"),
    "best": Condition(lambda case: bool(case.settings.eval_prompts and case.settings.eval_interval
                                        and case.settings.save),
                      "only with --eval-prompts, --eval-interval and --save"),
}  # fmt: skip


class FlagRule(NamedTuple):
    """A flag, its value, whether the combination is fine, and what is wrong with it otherwise."""

    flag: str
    value: object
    holds: bool
    reason: str


def condition(name: str) -> Condition:
    """One of `CONDITIONS`, or `loss:<flag>`: the policy loss has an option that the flag sets."""
    return _of_loss(name.removeprefix("loss:")) if name.startswith("loss:") else CONDITIONS[name]


def without_effect(case: FlagContext, given: dict[str, str | None]) -> dict[str, str]:
    """Flags that have no effect in a run -> why.

    `given`: the flags that somebody gave, on the command line or in a config file, each with the name of the condition
    under which it has an effect, if there is one.
    """
    return {
        flag: reason(case, name) for flag, name in given.items() if name is not None and not condition(name).holds(case)
    }


def warning(idle: dict[str, str]) -> str:
    """One line that says which flags have no effect, those with one reason together."""
    sequences_per_example: dict[str, list[str]] = {}
    for flag, why in idle.items():
        sequences_per_example.setdefault(why, []).append(flag)
    return "without effect: " + "; ".join(f"{', '.join(flags)} ({why})" for why, flags in sequences_per_example.items())


def check(case: FlagContext):
    """Raises UsageError with the first rule that is broken."""
    for rule in rules(case):
        if not rule.holds:
            raise UsageError(f"{rule.flag} {rule.value}: {rule.reason}")


def reason(case: FlagContext, name: str) -> str:
    """Why flags that need a condition have no effect."""
    return condition(name).reason.format_map(vars(case.settings))


def rules(case: FlagContext) -> list[FlagRule]:
    """Every rule for a run; always as many."""
    s = case.settings
    of_case = (_rewards(case), _sampling(case), _advantages(case), _replay(case))
    parts = (*of_case, _overlap(s), _kl(s), _correction(s), _evaluation(s))
    return [rule for part in parts for rule in part]


def _rewards(case: FlagContext) -> list[FlagRule]:
    s, names = case.settings, case.rewards
    return [
        FlagRule("--reward", s.reward, "model" not in names or s.reward_model is not None,
             "needs --reward-model: the folder of a run of train_reward"),
        FlagRule("--greedy-baseline", s.greedy_baseline, not s.greedy_baseline or not (s.reward_normalize or s.reward_clip),
             "takes plain scores; not with --reward-normalize or --reward-clip"),
        FlagRule("--reward", s.reward, "regex" not in names or s.reward_pattern is not None, "needs a --reward-pattern"),
        FlagRule("--reward", s.reward, "remote" not in names or s.reward_url is not None, "needs a --reward-url"),
    ]  # fmt: skip


def _sampling(case: FlagContext) -> list[FlagRule]:
    s, sequences, partial = case.settings, case.settings.sequences_per_step, case.settings.partial_rollouts
    return [
        FlagRule("--minibatch-size", s.minibatch_size, s.minibatch_size is None or s.minibatch_size <= sequences,
             f"allowed is at most --prompts-per-step × --samples-per-prompt = {sequences}"),
        FlagRule("--group-filter", s.group_filter, s.group_filter == "none" or s.samples_per_prompt > 1,
             "needs --samples-per-prompt 2 or more: a group of one has nothing to differ from"),
        FlagRule("--dynamic-sampling", s.dynamic_sampling, not s.dynamic_sampling or s.group_filter != "none",
             "needs a --group-filter, which says what the batch is filled with"),
        FlagRule("--over-sampling", s.over_sampling, s.over_sampling == 1 or not s.one_step_off,
             "not with --one-step-off: which groups come first is known at the end of all"),
        FlagRule("--partial-rollouts", partial, not partial or s.over_sampling > 1,
             "needs --over-sampling above 1: else every group of a round is written to its end"),
        FlagRule("--partial-rollouts", partial, not partial or s.rollout_correction != "none",
             "needs a --rollout-correction: the policies that wrote a part are behind the one that learns"),
        FlagRule("--overlong-buffer", s.overlong_buffer, s.overlong_buffer <= s.max_response_length,
             f"allowed is at most --max-response-length {s.max_response_length}"),
    ]  # fmt: skip


def _overlap(s: Settings) -> list[FlagRule]:
    ahead = s.one_step_off
    verdicts = {"--group-filter": s.group_filter != "none", "--greedy-baseline": s.greedy_baseline}
    written = [name for name, wants in verdicts.items() if wants]
    return [
        FlagRule("--one-step-off", ahead, not ahead or s.rollout_correction != "none",
             "needs a --rollout-correction: the policy that writes is one step behind the one that learns"),
        FlagRule("--one-step-off", ahead, not ahead or not written, f"not with {', '.join(written)}: nobody scores what is"
             " being written ahead"),
        FlagRule("--one-step-off", ahead, not ahead or not s.critic_warmup_steps, "not with --critic-warmup-steps"),
    ]  # fmt: skip


def _advantages(case: FlagContext) -> list[FlagRule]:
    s, needs = case.settings, case.estimator.needs
    return [
        FlagRule("--samples-per-prompt", s.samples_per_prompt, "groups" not in needs or s.samples_per_prompt > 1,
             f"--advantage {s.advantage} compares the responses to one prompt; allowed is 2 or more"),
        FlagRule("--advantage", s.advantage, "baselines" not in needs or s.greedy_baseline,
             "needs --greedy-baseline: the reward of a greedy response is subtracted"),
    ]  # fmt: skip


def _kl(s: Settings) -> list[FlagRule]:
    adapts, sequences = s.kl_controller == "adaptive", s.sequences_per_step
    return [
        FlagRule("--kl-estimator", s.kl_estimator, s.kl_in == "loss" or not s.kl_estimator.endswith("+"),
             "needs --kl-in loss: it changes the gradient alone, and a reward has none"),
        FlagRule("--kl-controller", s.kl_controller, not adapts or s.kl_target is not None, "needs a --kl-target"),
        # β must stay above 0: the largest step down is the factor 1 − 0.2·n/horizon.
        FlagRule("--kl-horizon", s.kl_horizon, not adapts or s.kl_horizon > 0.2 * sequences,
             f"allowed is more than 0.2 × {sequences} responses of a step"),
    ]  # fmt: skip


def _correction(s: Settings) -> list[FlagRule]:
    kind, level, cap, floor = (
        s.rollout_correction, s.rollout_correction_level, s.rollout_correction_cap, s.rollout_correction_floor,
    )  # fmt: skip
    return [
        FlagRule("--rollout-correction", kind, kind != "icepop" or floor is not None, "needs a --rollout-correction-floor"),
        FlagRule("--rollout-correction", kind, kind != "icepop" or level == "token",
             f"masks single tokens; not with --rollout-correction-level {level}"),
        FlagRule("--rollout-correction", kind, kind != "tis" or level != "geometric",
             "truncates importance weights, which a geometric mean is not; allowed levels are token, sequence"),
        FlagRule("--rollout-correction-floor", floor, floor is None or floor <= cap,
             f"allowed is at most --rollout-correction-cap {cap}"),
    ]  # fmt: skip


def _replay(case: FlagContext) -> list[FlagRule]:
    wants = case.settings.router_replay_reference
    return [
        FlagRule("--router-replay-reference", wants, not wants or "reference" in case.roles,
             "the run has no reference: --kl-coefficient is 0 and --role-map names none"),
    ]  # fmt: skip


def _evaluation(s: Settings) -> list[FlagRule]:
    responses, largest = s.eval_responses, max(whole_numbers(s.eval_k)) if s.eval_k else 1
    return [
        FlagRule("--eval-responses", responses, responses == 1 or s.eval_temperature > 0,
             "needs --eval-temperature above 0: greedy responses are all equal"),
        FlagRule("--eval-k", s.eval_k, largest <= responses, f"allowed is at most --eval-responses {responses}"),
    ]  # fmt: skip
