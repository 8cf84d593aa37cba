"""Which flags work together: flags without effect in a run, and invalid combinations, each with its reason.

Both are data. A flag has an effect if its condition holds (`condition`); otherwise it is dropped with a warning.
`rules` returns all rules, always in the same order; a run that breaks one is rejected with an error.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from megarl.algorithms.divergence import JSD
from megarl.algorithms.estimators import AdvantageOptions
from megarl.algorithms.kl import IN_LOSS
from megarl.algorithms.preference_loss import PreferenceLoss, PreferenceOptions
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.errors import UsageError
from megarl.flags.correction_rules import correction, is_corrected
from megarl.flags.distill_settings import LOSS, NONE, SIBLING
from megarl.flags.environment_settings import SESSIONS
from megarl.flags.fields import parse_ints
from megarl.flags.flag_context import FlagContext, FlagRule
from megarl.flags.learning_rules import comparisons, distillation, parts, preferences
from megarl.flags.reward_rules import rewards
from megarl.flags.settings import Settings
from megarl.observe.trackers.base import has_remote
from megarl.rewards.expression import COSINE, INFALLIBLE, JUDGE, MODEL, REPETITION, UNVERIFIED, is_plugin


class Condition(NamedTuple):
    """When flags have an effect, and the reason why they have none otherwise, with {fields} of `Settings`."""

    holds: Callable[[FlagContext], bool]
    reason: str


def _of_estimator(option: str) -> Condition:
    return Condition(lambda context: option in context.estimator.options, "--advantage {advantage} does not use them")


def _of_loss(flag: str) -> Condition:
    return Condition(
        lambda context: flag in context.policy_loss.flags(), "--policy-loss {policy_loss} does not use them"
    )


def _verifier(name: str) -> Condition:
    return Condition(lambda context: name in context.rewards, f"--reward {{reward}} has no {name} term")


def _when(holds: Callable[[Settings], object], reason: str) -> Condition:
    """A condition on other flags of megarl."""
    return Condition(lambda context: bool(holds(context.settings)), reason)


def _serves(context: FlagContext) -> bool:
    return context.program == "serve" or context.settings.serve_policy


def _thinks(context: FlagContext) -> bool:
    return _serves(context) or context.settings.thinking_budget is not None


def _learns_preferences(context: FlagContext) -> bool:
    return context.program != "rl" or "preference" in context.estimator.options


def _of_preference_loss(holds: Callable[[PreferenceLoss], bool]) -> Condition:
    def does(context: FlagContext) -> bool:
        loss = PREFERENCE_LOSSES[context.settings.preference_loss]
        return context.program == "reward" or _learns_preferences(context) and holds(loss)

    return Condition(does, "--preference-loss {preference_loss} does not use them")


def _preference_option(name: str) -> Condition:
    return _of_preference_loss(lambda loss: name in loss.options)


# Options of estimators whose flags are dropped where they have no effect; --credit turns is refused instead, and those
# of preferences are flags of train_preference, too.
_DROPPED = {option.name for option in dataclasses.fields(AdvantageOptions)} - {"credit_turns", "preference"}


CONDITIONS: dict[str, Condition] = {
    **{f"estimator:{name}": _of_estimator(name) for name in sorted(_DROPPED)},
    "preference": Condition(_learns_preferences, "--advantage {advantage} does not use them"),
    **{name: _verifier(name) for name in ("regex", "format", "length", "code", "remote", COSINE, REPETITION)},
    **{f"preference:{name}": _preference_option(name) for name in PreferenceOptions._fields},
    "labels": _of_preference_loss(lambda loss: not loss.reads_pairs),
    "margin": _of_preference_loss(lambda loss: loss.reads_margin),
    "model": Condition(lambda context: context.program == "reward" or "model" in context.rewards,
                       "--reward {reward} has no model"),
    "judge": _verifier(JUDGE),
    "scoring_model": Condition(lambda context: context.program == "reward" or bool(context.rewards & {MODEL, JUDGE}),
                               "--reward {reward} has neither model nor judge"),
    "ensemble": Condition(lambda context: "model" in context.rewards and "," in (context.settings.reward_model or ""),
                          "needs several folders in --reward-model"),
    "fallible": Condition(lambda context: bool(context.rewards - {*INFALLIBLE}),
                          "--reward {reward} has neither a verifier nor a judge"),
    "concurrent": Condition(lambda context: "remote" in context.rewards or any(map(is_plugin, context.rewards)),
                            "--reward {reward} has neither a remote term nor a plug-in, which may be async"),
    "local": Condition(lambda context: bool(context.rewards - {*UNVERIFIED, "remote"}),
                       "--reward {reward} has no verifier that runs locally"),
    "context": _when(lambda s: s.distill != NONE and s.teacher_context == SIBLING, "needs --teacher-context sibling"),
    "critic": Condition(lambda context: "critic" in context.roles, "--advantage {advantage} needs no critic"),
    "reference": Condition(lambda context: "reference" in context.roles,
                           "--kl-coefficient is 0 and --role-map has no reference"),
    "distill": _when(lambda s: s.distill != NONE, "--distill is none"),
    "distill-loss": _when(lambda s: s.distill == LOSS, "needs --distill loss"),
    "jsd": _when(lambda s: s.distill == LOSS and s.distill_divergence == JSD,
                 "needs --distill loss and --distill-divergence jsd"),
    "teacher": Condition(lambda context: "teacher" in context.roles, "--distill is none"),
    "refreshes": _when(lambda s: s.reference_update_interval > 0, "needs --reference-update-interval"),
    "average": _when(lambda s: s.ema_decay is not None and s.evaluates, "needs --ema-decay and --eval-prompts"),
    "baselines": Condition(lambda context: "baselines" in context.estimator.needs,
                           "--advantage {advantage} needs no greedy responses"),
    "sampled": Condition(lambda context: context.program != "evaluate" or context.settings.eval_temperature > 0,
                         "--eval-temperature 0 is greedy"),
    "evaluation": Condition(lambda context: context.program == "evaluate" or context.settings.evaluates,
                            "needs --eval-prompts"),
    "serve_policy": Condition(_serves, "needs --serve-policy"),
    "listens": Condition(lambda context: _serves(context) or context.settings.agent_sessions,
                         "needs --serve-policy or --agent-sessions"),
    "norm": _when(lambda s: s.loss_aggregation == "seq-mean-token-sum-norm",
                  "needs --loss-aggregation seq-mean-token-sum-norm"),
    "kl": _when(lambda s: s.kl_coefficient > 0, "--kl-coefficient is 0"),
    "adaptive": _when(lambda s: s.kl_controller == "adaptive" and s.kl_coefficient > 0,
                      "needs --kl-controller adaptive and --kl-coefficient above 0"),
    "correction": _when(lambda s: s.rollout_correction != "none", "--rollout-correction is none"),
    "icepop": _when(lambda s: s.rollout_correction == "icepop", "needs --rollout-correction icepop"),
    "routes": _when(lambda s: s.router_replay == "rollout", "needs --router-replay rollout"),
    "rounds": _when(lambda s: s.dynamic_sampling, "needs --dynamic-sampling"),
    "partial": _when(lambda s: s.partial_rollouts, "needs --partial-rollouts"),
    "range": _when(lambda s: s.group_filter == "range", "needs --group-filter range"),
    "pools": _when(lambda s: s.pool_bounds is not None, "needs --pool-bounds"),
    "overlong": _when(lambda s: s.overlong_buffer > 0, "--overlong-buffer is 0"),
    "environment": _when(lambda s: s.environment is not None, "needs --environment"),
    "branches": _when(lambda s: s.branch_turns > 0, "needs --branch-turns"),
    "workers": _when(lambda s: s.environment is not None and not s.agent_sessions,
                     "needs --environment: --agent-sessions has no worker processes"),
    "tool_calls": Condition(lambda context: _thinks(context) or context.settings.environment is not None,
                            "needs --environment, --serve-policy or --thinking-budget"),
    "thinks": Condition(_thinks, "needs --thinking-budget or --serve-policy"),
    "engine": _when(lambda s: not s.debug_train_only, "--debug-train-only has no rollout engine"),
    "prefixes": _when(lambda s: s.rollout_prefix_caching and not s.debug_train_only, "needs --rollout-prefix-caching"),
    "trained": _when(lambda s: not s.debug_rollout_only, "--debug-rollout-only trains nothing"),
    "ahead": _when(lambda s: not s.debug_train_only and not s.debug_rollout_only,
                   "--debug-train-only and --debug-rollout-only do not generate ahead"),
    "evaluates": _when(lambda s: not s.debug_train_only and not s.debug_rollout_only,
                       "--debug-train-only and --debug-rollout-only evaluate nothing"),
    "profile": _when(lambda s: s.profile_steps is not None, "needs --profile-steps"),
    "rollout_server": _when(lambda s: s.rollout_server is not None, "needs --rollout-server"),
    "tracked": _when(lambda s: s.save is not None and has_remote(s.trackers),
                     "needs --save and wandb or mlflow in --trackers"),
    "saved": _when(lambda s: s.save is not None, "needs --save"),
    "exported": _when(lambda s: s.export_hf, "needs --export-hf"),
    "keep_last": _when(lambda s: s.keep_last > 0, "needs --keep-last"),
    "load": _when(lambda s: s.load is not None, "needs --load"),
    "best": _when(lambda s: s.evaluates and s.eval_interval and s.save,
                  "needs --eval-prompts, --eval-interval and --save"),
}  # fmt: skip


def condition(name: str) -> Condition:
    """One of `CONDITIONS`; `loss:<flag>` holds if the policy loss has the option that the flag sets."""
    return _of_loss(name.removeprefix("loss:")) if name.startswith("loss:") else CONDITIONS[name]


def without_effect(context: FlagContext, given: dict[str, str | None]) -> dict[str, str]:
    """Given flags that have no effect in a run, with the reason.

    Args:
        given: flags of the command line and the config files -> name of the condition under which each has an effect;
            None: always.
    """
    conditional = {flag: name for flag, name in given.items() if name is not None}
    return {flag: reason(context, name) for flag, name in conditional.items() if not condition(name).holds(context)}


def warning(idle: dict[str, str]) -> list[str]:
    """One line that names the flags without effect, grouped by reason; none without any."""
    if not idle:
        return []
    by_reason: dict[str, list[str]] = {}
    for flag, why in idle.items():
        by_reason.setdefault(why, []).append(flag)
    return ["without effect: " + "; ".join(f"{', '.join(flags)} ({why})" for why, flags in by_reason.items())]


def cautions(context: FlagContext) -> list[str]:
    """Warnings about combinations that run, but seldom as the user expects."""
    s, found = context.settings, []
    if "parts" in context.estimator.needs and not s.part_weights:
        found.append(f"--advantage {s.advantage}: --reward {s.reward} has one part that counts, so that there are no "
                     "others to tell apart")  # fmt: skip
    if (sizes := s.uneven_minibatches) is not None and not s.debug_rollout_only:
        found.append(f"--minibatch-size {s.minibatch_size}: the last mini-batch of a step has {sizes[0]} responses "
                     f"instead of {sizes[1]}, and is an update like the others")  # fmt: skip
    if not s.generation_lag or is_corrected(context) or s.debug_rollout_only:
        return found
    return [
        *found,
        f"--generation-lag {s.generation_lag} without --rollout-correction: responses are up to {s.generation_lag} "
        "updates old, and the loss takes them for the trained policy's",
    ]


def check(context: FlagContext):
    """UsageError for the first broken rule."""
    for rule in rules(context):
        if not rule.holds:
            raise UsageError(rule.problem(context.settings))


def reason(context: FlagContext, name: str) -> str:
    """Why flags that need a condition have no effect."""
    if name in ("critic", "reference", "teacher") and context.settings.debug_rollout_only:
        return "--debug-rollout-only trains nothing"
    if name.startswith("preference:") and not _learns_preferences(context):
        name = "preference"
    return condition(name).reason.format_map(vars(context.settings))


def rules(context: FlagContext) -> list[FlagRule]:
    """All rules of a run, always the same number in the same order."""
    s = context.settings
    return [
        *rewards(context), *_sampling(context), *_training(context), *distillation(context), *preferences(context),
        *parts(context), *comparisons(context), *_overlap(s), *_kl(s), *correction(context), *_evaluation(s),
        *_export(s), *_debug(s), *_environments(s),
    ]  # fmt: skip


def _sampling(context: FlagContext) -> list[FlagRule]:
    s = context.settings
    sequences, partial = s.sequences_per_step, s.partial_rollouts
    return [
        FlagRule("--minibatch-size", s.minibatch_size is None or s.minibatch_size <= sequences,
             f"allowed is at most --prompts-per-step × --samples-per-prompt = {sequences}"),
        FlagRule("--branch-samples", not s.branch_turns or s.branch_samples < s.samples_per_prompt,
             f"allowed is less than --samples-per-prompt {s.samples_per_prompt}: no baseline of a group says what turns"
             " are worth that all of its samples share"),
        FlagRule("--group-filter", s.group_filter == "none" or s.samples_per_prompt > 1,
             "needs --samples-per-prompt 2 or more: it compares the responses of a group"),
        FlagRule("--dynamic-sampling", not s.dynamic_sampling or s.group_filter != "none",
             "needs --group-filter reward, correct or range: without a filter the batch is always full"),
        FlagRule("--pool-bounds", s.pool_bounds is None or s.samples_per_prompt > 1,
             "needs --samples-per-prompt 2 or more: a prompt is as difficult as its group says"),
        FlagRule("--pool-bounds", s.pool_bounds is None or bool(context.terms),
             "needs a --reward that says which responses are correct"),
        FlagRule("--pool-bounds", s.pool_bounds is None or not s.debug_train_only,
             "not allowed with --debug-train-only, whose prompts are those of --load-rollouts"),
        FlagRule("--rollout-bank", s.rollout_bank is None or s.save is not None,
             "needs --save: a checkpoint tells which responses are no longer needed"),
        FlagRule("--partial-rollouts", not partial or s.over_sampling > 1,
             "needs --over-sampling above 1: otherwise every group of a round is finished"),
        FlagRule("--partial-rollouts", not partial or is_corrected(context),
             "needs a --rollout-correction, an --old-logprobs of the rollout or a --policy-loss that reads them: older"
             " policies than the trained one generated parts of a response"),
        FlagRule("--overlong-buffer", s.overlong_buffer <= s.max_response_length,
             f"allowed is at most --max-response-length {s.max_response_length}"),
    ]  # fmt: skip


def _overlap(s: Settings) -> list[FlagRule]:
    lag, records, replays = s.generation_lag, s.generation_schedule == "recorded", s.replay_schedule is not None
    return [
        FlagRule("--max-staleness", not 0 < s.max_staleness < lag,
             f"allowed is 0, or at least --generation-lag {lag}: all responses are that many updates old"),
        FlagRule("--generation-schedule", not records or lag > 0,
             "needs --generation-lag 1 or more: without it a round has no choice of weights to record"),
        FlagRule("--generation-schedule", not records or s.save is not None,
             "needs --save, where the schedule is written"),
        FlagRule("--generation-schedule", not records or not replays,
             "not allowed with --replay-schedule, which decides everything; leave one of them out"),
        FlagRule("--replay-schedule", not replays or lag > 0, "needs the --generation-lag of the recorded run"),
        FlagRule("--rollout-bank", s.rollout_bank is None or not s.is_scheduled,
             "keeps responses of one policy; not allowed with --generation-schedule recorded or --replay-schedule"),
    ]  # fmt: skip


def _training(context: FlagContext) -> list[FlagRule]:
    s, needs = context.settings, context.estimator.needs
    return [
        FlagRule("--samples-per-prompt", "groups" not in needs or s.samples_per_prompt > 1,
             f"--advantage {s.advantage} compares the responses to a prompt; allowed is 2 or more"),
        FlagRule("--advantage", "baselines" not in needs or s.greedy_baseline,
             "needs --greedy-baseline, whose reward it subtracts"),
        FlagRule("--credit", s.credit == "episode" or "credit_turns" in context.estimator.options,
             "needs --advantage rloo: it compares each turn with the same turn of the other responses to the prompt"),
        FlagRule("--router-replay-reference",
             not s.router_replay_reference or "reference" in context.roles or s.debug_rollout_only,
             "the run has no reference: --kl-coefficient is 0 and --role-map names none"),
    ]  # fmt: skip


def _kl(s: Settings) -> list[FlagRule]:
    adapts, sequences = s.kl_controller == "adaptive", s.sequences_per_step
    return [
        FlagRule("--kl-estimator", s.kl_in == "loss" or s.kl_estimator not in IN_LOSS,
             "needs --kl-in loss: it changes only the gradient, and a reward has none"),
        FlagRule("--kl-controller", not adapts or s.kl_target is not None, "needs --kl-target"),
        # β must stay above 0: an update multiplies it by at least 1 − 0.2·n/horizon.
        FlagRule("--kl-horizon", not adapts or s.kl_horizon > 0.2 * sequences,
             f"allowed is more than 0.2 × {sequences} responses of a step"),
    ]  # fmt: skip


def _evaluation(s: Settings) -> list[FlagRule]:
    responses, max_k = s.eval_responses, max(parse_ints(s.eval_k)) if s.eval_k else 1
    return [
        FlagRule("--eval-responses", responses == 1 or s.eval_temperature > 0,
             "needs --eval-temperature above 0: greedy responses are all equal"),
        FlagRule("--eval-k", max_k <= responses, f"allowed is at most --eval-responses {responses}"),
    ]  # fmt: skip


def _export(s: Settings) -> list[FlagRule]:
    return [
        FlagRule("--export-hf", not s.export_hf or s.save is not None, "needs --save"),
        FlagRule("--export-peft", not s.export_peft or s.save is not None, "needs --save"),
    ]  # fmt: skip


def _debug(s: Settings) -> list[FlagRule]:
    train_only, saves = s.debug_train_only, s.save_rollouts
    return [
        FlagRule("--debug-train-only", not train_only or s.load_rollouts is not None,
                 "needs --load-rollouts: without an engine the responses come from a folder"),
        FlagRule("--load-rollouts", s.load_rollouts is None or train_only,
                 "needs --debug-train-only: other runs generate their responses"),
        FlagRule("--debug-rollout-only", not s.debug_rollout_only or not train_only,
                 "not allowed with --debug-train-only: nothing would be left of a step"),
        FlagRule("--serve-policy", not s.serve_policy or not train_only,
                 "not allowed with --debug-train-only, which has no rollout engine"),
        FlagRule("--save-rollouts", not saves or s.save is not None, "needs --save"),
        FlagRule("--save-rollouts", not saves or not train_only,
                 "not allowed with --debug-train-only: they are in --load-rollouts already"),
        FlagRule("--profile-steps", s.profile_steps is None or s.save is not None, "needs --save"),
    ]  # fmt: skip


def _environments(s: Settings) -> list[FlagRule]:
    name = s.environment
    in_sessions = {
        "--serve-policy": s.serve_policy, "--over-sampling": s.over_sampling > 1, "--credit turns": s.credit == "turns",
        "--rollout-bank": s.rollout_bank is not None, "--branch-turns": s.branch_turns > 0,
    }  # fmt: skip
    not_in_sessions = [flag for flag, is_set in in_sessions.items() if is_set]
    return [
        FlagRule("--agent-sessions", not s.agent_sessions or name == SESSIONS,
             "drivers outside of the run are the environment; leave --environment out"),
        FlagRule("--agent-sessions", not s.agent_sessions or not not_in_sessions,
             f"not allowed with {', '.join(not_in_sessions)}"),
        FlagRule("--branch-turns", s.branch_turns < s.max_turns or name is None,
             f"leaves an episode no turn of its own; allowed is less than --max-turns {s.max_turns}"),
        FlagRule("--environment", name is None or not s.is_scheduled or s.over_sampling == 1,
             "not allowed with --over-sampling where the clock decides (--generation-schedule recorded,"
             " --replay-schedule)"),
        FlagRule("--thinking-budget", s.thinking_budget is None or s.credit == "episode",
             "not allowed with --credit turns, which tells turns apart by what the policy has chosen"),
        FlagRule("--max-turn-length", (s.max_turn_length or 0) <= s.max_response_length,
             f"allowed is at most --max-response-length {s.max_response_length}, which holds all turns and "
             "observations"),
    ]  # fmt: skip
