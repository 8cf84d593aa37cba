"""Rules of what a policy learns from besides rewards: a teacher, and preferences within groups."""

from megarl.algorithms.estimators import NO_ADVANTAGE
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.flags.correction_settings import INTERPOLATE, RECOMPUTE
from megarl.flags.distill_settings import AVERAGE, GIVEN, NONE, REWARD, SIBLING
from megarl.flags.flag_context import FlagContext, FlagRule
from megarl.rewards.expression import EXACT_MATCH


def distillation(context: FlagContext) -> list[FlagRule]:
    """Rules of runs with a teacher, and of those that would learn nothing without one."""
    s, is_rl = context.settings, context.program == "rl"
    counts, has_teacher = any(term.weight for term in context.terms), s.distill != NONE
    longest, reads_siblings = s.teacher_max_prompt_length, s.teacher_context == SIBLING
    has_advantage = s.advantage != NO_ADVANTAGE
    held_out = "--evals" if s.eval_prompts is None else "--eval-prompts"
    return [
        FlagRule("--reward", bool(context.terms) or has_teacher, "needs --distill: nothing else would be learnt"),
        FlagRule("--reward", counts or not context.terms or (has_teacher and is_rl),
             "every weight is 0; at least one term must count"),
        FlagRule("--advantage", has_advantage or has_teacher, "needs --distill: nothing else would be learnt"),
        FlagRule("--advantage", counts or not has_advantage or not is_rl or not has_teacher,
             "no reward counts, so that all advantages are 0; allowed is none"),
        FlagRule("--advantage", has_advantage or not counts,
             f"leaves out what --reward {s.reward} says; give it weight 0, or take another estimator"),
        FlagRule("--advantage", has_advantage or s.kl_in == "loss" or not s.kl_coefficient,
             "leaves out the KL in the reward; give --kl-in loss or --kl-coefficient 0"),
        FlagRule("--teacher", s.teacher != AVERAGE or s.ema_decay is not None, "needs --ema-decay"),
        FlagRule("--teacher", s.teacher != AVERAGE or not s.generation_lag,
             "needs --generation-lag 0: the average of a step is known when the step is trained"),
        FlagRule("--teachers", s.teachers is None or s.teacher == GIVEN,
             f"names the teachers' folders; not allowed with --teacher {s.teacher}"),
        FlagRule("--teacher-context", not reads_siblings or s.samples_per_prompt > 1,
             "needs --samples-per-prompt 2 or more: the sibling is another response to the prompt"),
        FlagRule("--teacher-context", not reads_siblings or bool(context.terms),
             f"needs a --reward that says which responses are correct; one of weight 0, as 0*{EXACT_MATCH}, is not"
             " learnt"),
        FlagRule("--teacher-context", not reads_siblings or (longest or 0) > s.max_prompt_length,
             f"needs --teacher-max-prompt-length above --max-prompt-length {s.max_prompt_length}: a response is before"
             " the question"),
        FlagRule("--teacher-context", not reads_siblings or s.environment is None,
             "not allowed with --environment, whose responses hold its own texts"),
        FlagRule("--group-filter", s.group_filter not in ("reward", "range") or counts or not is_rl,
             "no reward counts, so that all groups would be dropped"),
        FlagRule(held_out, not s.evaluates or bool(context.terms),
             f"needs a --reward that measures the responses; one of weight 0, as 0*{EXACT_MATCH}, is not learnt"),
    ]  # fmt: skip


def parts(context: FlagContext) -> list[FlagRule]:
    """Rules of estimators that read the parts of the reward, or Σπ²."""
    s, reads = context.settings, "parts" in context.estimator.needs
    return [
        FlagRule("--advantage", not s.reads_squares or s.old_logprobs == RECOMPUTE,
                 f"reads Σπ² over the vocabulary, which --old-logprobs {s.old_logprobs} does not compute"),
        FlagRule("--kl-in", not reads or s.kl_in == "loss" or s.kl_coefficient == 0,
                 f"--advantage {s.advantage} compares the parts of --reward, of which the KL is none; allowed is loss,"
                 " or --kl-coefficient 0"),
    ]  # fmt: skip


def comparisons(context: FlagContext) -> list[FlagRule]:
    """Rules of a policy loss that compares the responses of a group."""
    s, is_other = context.settings, context.policy_loss.compare is None
    size, group = s.minibatch_size or s.sequences_per_step, s.samples_per_prompt
    return [
        FlagRule("--policy-loss", is_other or group > 1,
             "compares the responses of a group; needs --samples-per-prompt 2 or more"),
        FlagRule("--minibatch-size", is_other or size >= s.sequences_per_step or not size % group,
             f"would split groups, whose responses --policy-loss {s.policy_loss} compares; allowed are multiples of"
             f" --samples-per-prompt {group}"),
        FlagRule("--old-logprobs", is_other or s.old_logprobs != INTERPOLATE,
             f"changes between the updates; allowed with --policy-loss {s.policy_loss} are recompute, rollout"),
        FlagRule("--distill", is_other or s.distill != REWARD,
             f"adds to the advantages, of which --policy-loss {s.policy_loss} reads the sign alone; allowed are loss,"
             " none"),
    ]  # fmt: skip


def preferences(context: FlagContext) -> list[FlagRule]:
    """Rules of `--advantage preference`."""
    s, of_pairs = context.settings, [name for name, loss in PREFERENCE_LOSSES.items() if loss.reads_pairs]
    is_other = "logprobs" not in context.estimator.needs
    return [
        FlagRule("--preference-loss", is_other or s.preference_loss in of_pairs,
                 f"reads single responses; allowed with --advantage preference are {', '.join(of_pairs)}"),
        FlagRule("--policy-loss", is_other or s.policy_loss == "reinforce",
                 "--advantage preference needs reinforce, whose gradient is then that of --preference-loss"),
        FlagRule("--loss-aggregation", is_other or s.loss_aggregation == "seq-mean-token-sum",
                 "--advantage preference needs seq-mean-token-sum, whose gradient is then that of --preference-loss"),
        FlagRule("--advantage", is_other or s.updates_per_step == 1,
                 "is the gradient before the step; allowed is one update a step: --ppo-epochs 1, and a"
                 " --minibatch-size of the whole batch"),
        FlagRule("--advantage", is_other or s.kl_in == "loss" or s.kl_coefficient == 0,
                 "compares rewards without a KL; needs --kl-coefficient 0 or --kl-in loss"),
        FlagRule("--rollout-correction", is_other or s.rollout_correction == "none",
                 "--advantage preference needs none: a pair may be of any policy's responses"),
        FlagRule("--old-logprobs", is_other or s.old_logprobs == RECOMPUTE,
                 "--advantage preference needs recompute: its gradient is at the policy before the step"),
        FlagRule("--rollout-rejection", is_other or s.rollout_rejection is None,
                 "not allowed with --advantage preference: a pair would lose one of its responses"),
        FlagRule("--mask-truncated-responses", is_other or not s.mask_truncated_responses,
                 "not allowed with --advantage preference: a pair would lose one of its responses"),
    ]  # fmt: skip
