"""Which terms of --reward go together, and what each needs."""

from megarl.flags.flag_context import FlagContext, FlagRule
from megarl.rewards.expression import ADAPTIVE, ENVIRONMENT, JUDGE, MODEL


def rewards(context: FlagContext) -> list[FlagRule]:
    """Rules of `--reward` and its options."""
    s, names = context.settings, context.rewards
    return [
        FlagRule("--reward", "model" not in names or bool(s.reward_model or s.reward_hf_model),
             "needs --reward-model, a run folder of train_reward, or --reward-hf-model"),
        FlagRule("--reward", not {MODEL, JUDGE} <= names,
             "the reward role runs one model: a reward model (model) or a judge (judge); leave one of them out"),
        FlagRule("--reward", JUDGE not in names or s.judge_config is not None,
             "needs --judge-config, a file that says what the judge reads"),
        FlagRule("--reward", JUDGE not in names or bool(s.judge_hf_model or s.judge_load),
             "needs --judge-hf-model or --judge-load, the judge's weights"),
        FlagRule("--reward", ENVIRONMENT not in names or s.environment is not None,
             "needs --environment, whose rewards the term environment is"),
        FlagRule("--samples-per-prompt", ADAPTIVE not in names or s.samples_per_prompt > 1,
             f"{ADAPTIVE} in --reward needs 2 or more: it reads the mean reward of a prompt's responses"),
        FlagRule("--greedy-baseline", not s.greedy_baseline or not (s.reward_normalize or s.reward_clip),
             "uses raw scores; not allowed with --reward-normalize or --reward-clip"),
        FlagRule("--reward", "regex" not in names or s.reward_pattern is not None, "needs --reward-pattern"),
        FlagRule("--reward", "remote" not in names or s.reward_url is not None, "needs --reward-url"),
    ]  # fmt: skip
