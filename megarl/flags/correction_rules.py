"""Rules of the gap between rollout and training: `--rollout-correction`, `--rollout-rejection`, `--old-logprobs`."""

from megarl.flags.correction_settings import INTERPOLATE, RECOMPUTE
from megarl.flags.flag_context import FlagContext, FlagRule


def is_corrected(context: FlagContext) -> bool:
    """Whether the loss knows that another policy than the trained one generated."""
    s = context.settings
    return s.rollout_correction != "none" or s.old_logprobs != RECOMPUTE or context.policy_loss.reads_rollout


def correction(context: FlagContext) -> list[FlagRule]:
    """Rules of how the rollout's policy enters the loss."""
    s = context.settings
    return [*_weights(context), *_old_logprobs(context), FlagRule(
        "--rollout-rejection", s.rollout_rejection is None or s.old_logprobs == RECOMPUTE,
        f"compares the rollout with the policy before the step; not allowed with --old-logprobs {s.old_logprobs}, which"
        " does not compute its log-probs")]  # fmt: skip


def _weights(context: FlagContext) -> list[FlagRule]:
    s = context.settings
    kind, level, floor = s.rollout_correction, s.rollout_correction_level, s.rollout_correction_floor
    return [
        FlagRule("--rollout-correction", kind != "icepop" or floor is not None, "needs --rollout-correction-floor"),
        FlagRule("--rollout-correction", kind != "icepop" or level == "token",
             f"masks single tokens; not allowed with --rollout-correction-level {level}"),
        FlagRule("--rollout-correction", kind != "tis" or level != "geometric",
             "truncates importance weights, and a geometric mean is none; allowed levels are token, sequence"),
        FlagRule("--rollout-correction", kind == "none" or not context.policy_loss.reads_rollout,
             f"would weigh twice: --policy-loss {s.policy_loss} has the ratio to the rollout's policy already"),
        FlagRule("--rollout-correction", kind == "none" or s.old_logprobs == RECOMPUTE,
             f"weighs by π_old/μ, which --old-logprobs {s.old_logprobs} takes for 1; leave one of them out"),
        FlagRule("--rollout-correction-floor", floor is None or floor <= s.rollout_correction_cap,
             f"allowed is at most --rollout-correction-cap {s.rollout_correction_cap}"),
    ]  # fmt: skip


def _old_logprobs(context: FlagContext) -> list[FlagRule]:
    s = context.settings
    other = s.old_logprobs != RECOMPUTE
    return [
        FlagRule("--old-logprobs", s.old_logprobs != INTERPOLATE or s.has_stale_tokens,
             "moves tokens of older policies; needs --generation-lag or --partial-rollouts"),
        FlagRule("--old-logprobs", not other or s.policy_loss != "m2po",
             "leaves nothing to mask: --policy-loss m2po compares π_old with the rollout; allowed is recompute"),
        FlagRule("--old-logprobs", not other or s.router_replay != "old-logprob",
             "has no pass whose routes --router-replay old-logprob could replay; allowed is rollout"),
    ]  # fmt: skip
