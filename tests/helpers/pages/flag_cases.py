"""For every flag an allowed value, and the flags without which it has no effect."""

import dataclasses

from megarl.algorithms.estimators import AdvantageOptions
from megarl.algorithms.preference_losses import PreferenceOptions
from megarl.flags import algorithm, conditions, data, preferences, rewards, settings
from megarl.flags.conditions import Condition
from megarl.flags.settings import Settings
from megarl.rewards import expression

FOLDERS = (
    "hf_model",
    "reward_hf_model",
    "judge_hf_model",
    "lora_adapter",
    "teachers",
    "model_source",  # needs one
)  # read at once: see test_hf_models.py, test_peft_files.py, test_teacher.py, test_module_map.py
FIELDS = [field for field in dataclasses.fields(Settings) if field.name not in FOLDERS]

ONLINE = (  # preferences from groups
    "--advantage preference --policy-loss reinforce --loss-aggregation seq-mean-token-sum --kl-in loss"
)

CONTEXT = (  # a teacher that reads siblings
    "--distill loss --reward exact-match --advantage grpo --samples-per-prompt 4 --teacher-context sibling"
    " --teacher-max-prompt-length 9000"
)

STATES = (  # a model with recurrent states, whose prefixes are kept
    "--rollout-prefix-caching --experimental-attention-variant gated_delta_net --linear-attention-freq 2"
    " --normalization RMSNorm --disable-bias-linear"
)

# Name of a condition (`named_conditions`) -> flags under which it holds, and flags under which it does not.
HOLDS = {
    "estimator:gamma": "", "estimator:lam": "", "estimator:group_std": "--advantage grpo", "estimator:whiten": "",
    "estimator:length_alpha": "", "ENVIRONMENT": "--environment x:y", "TOOL_CALLS": "--environment x:y",
    "THINKS": "--thinking-budget 9",
    "WORKERS": "--environment x:y", "BRANCHES": "--environment x:y --branch-turns 1", "LISTENS": "--agent-sessions",
    "CRITIC": "", "REFERENCE": "", "KL": "", "REFRESHES": "--reference-update-interval 2",
    "DISTILLS": "--distill loss", "DISTILL_LOSS": "--distill loss", "TEACHER": "--distill loss",
    "OF_JSD": "--distill loss --distill-divergence jsd", "CONTEXT": CONTEXT,
    "AVERAGES": "--ema-decay 0.5 --eval-prompts x",
    "BASELINES": "--advantage remax", "NORM": "--loss-aggregation seq-mean-token-sum-norm",
    "ADAPTIVE_KL": "--kl-controller adaptive --kl-target 1", "CORRECTION": "--rollout-correction tis",
    "ICEPOP": "--rollout-correction icepop --rollout-correction-floor 0.1",
    "ROUTES": "--router-replay rollout", "GUESTS": "--replica-port 9",
    "PARTIAL": "--partial-rollouts --over-sampling 2 --rollout-correction tis",
    "ROUNDS": "--dynamic-sampling --group-filter reward", "OVERLONG": "--overlong-buffer 4",
    "SAMPLED": "--eval-prompts x --eval-temperature 1", "EVALUATION": "--eval-prompts x",
    "BEST": "--eval-prompts x --eval-interval 1 --save y", "LOADED": "--load x", "SAVED": "--save y",
    "KEEPS_LAST": "--save y --keep-last 1", "EXPORTED": "--save y --export-hf", "ROLLOUT_SERVER": "--rollout-server http://x",
    "SERVES": "--serve-policy", "ENGINE": "", "PREFIXES": STATES, "EVALUATES": "",
    "TRAINED": "", "AHEAD": "", "KEPT": "--save y",
    "PROFILE": "--save y --profile-steps 2-3",
    "TRACKED": "--save y --trackers wandb",
    "REWARD_MODEL": "--reward model --reward-model x",
    "JUDGED": "--reward judge --judge-config x --judge-load y", "SCORING_MODEL": "--reward model --reward-model x",
    "FALLIBLE": "",
    "ENSEMBLE": "--reward model --reward-model x,y", "reward:regex": "--reward regex --reward-pattern x",
    "reward:format": "--reward format", "reward:length": "--reward length", "reward:code": "--reward code",
    "reward:cosine": "--reward 0*exact-match+cosine", "reward:repetition": "--reward repetition",
    "RANGE": "--group-filter range", "POOLS": "--pool-bounds 0.1,0.9",
    "reward:remote": "--reward remote --reward-url http://x", "LOCAL": "", "MARGIN": "",
    "CONCURRENT": "--reward remote --reward-url http://x",
    "PREFERENCES": ONLINE,
    "preference:beta": "", "preference:label_smoothing": "", "preference:gamma": "--preference-loss simpo",
    "preference:coefficient": "--preference-loss rpo", "LABELS": "--preference-loss kto",
    "preference:desirable_weight": "--preference-loss kto", "preference:undesirable_weight": "--preference-loss kto",
}  # fmt: skip
FAILS = {
    "estimator:whiten": ONLINE, "PREFERENCES": "",
    "estimator:gamma": "--advantage grpo", "estimator:lam": "--advantage reinforce++", "estimator:group_std": "",
    "estimator:length_alpha": "--advantage grpo",
    "ENVIRONMENT": "", "WORKERS": "--agent-sessions", "BRANCHES": "--environment x:y", "LISTENS": "",
    "DISTILLS": "", "DISTILL_LOSS": "--distill reward", "OF_JSD": "--distill loss", "TEACHER": "",
    "CONTEXT": "--distill loss",
    "CRITIC": "--advantage grpo", "REFERENCE": "--kl-coefficient 0", "KL": "--kl-coefficient 0", "REFRESHES": "",
    "AVERAGES": "--ema-decay 0.5",
    "BASELINES": "",
    "NORM": "", "ADAPTIVE_KL": "", "CORRECTION": "", "ICEPOP": "--rollout-correction mis",
    "ROUTES": "--router-replay old-logprob", "GUESTS": "",
    "PARTIAL": "--over-sampling 2", "AHEAD": "--debug-rollout-only", "KEPT": "",
    "ROUNDS": "--group-filter reward", "OVERLONG": "", "EVALUATION": "", "BEST": "--eval-prompts x --eval-interval 1",
    "LOADED": "", "SAVED": "", "TRACKED": "--save y", "KEEPS_LAST": "--save y", "EXPORTED": "--save y",
    "ROLLOUT_SERVER": "", "SERVES": "", "TOOL_CALLS": "", "THINKS": "",
    "ENGINE": "--debug-train-only --load-rollouts x", "PREFIXES": "", "EVALUATES": "--debug-rollout-only",
    "TRAINED": "--debug-rollout-only", "PROFILE": "",
    "REWARD_MODEL": "", "JUDGED": "", "SCORING_MODEL": "", "FALLIBLE": "--reward model --reward-model x",
    "ENSEMBLE": "--reward model --reward-model x", "reward:regex": "",
    "reward:format": "", "reward:length": "", "reward:code": "",
    "reward:cosine": "", "reward:repetition": "", "RANGE": "--group-filter reward", "POOLS": "",
    "MARGIN": "--preference-loss ipo", "preference:beta": "--preference-loss orpo",
    "preference:label_smoothing": "--preference-loss ipo", "preference:gamma": "", "preference:coefficient": "",
    "LABELS": "", "preference:desirable_weight": "", "preference:undesirable_weight": "",
    "reward:remote": "", "CONCURRENT": "", "LOCAL": "--reward remote --reward-url http://x",
}  # fmt: skip

# Fields whose value or required flags do not follow from their type and condition.
VALUES = {
    "role_map": "actor=0;critic=1;reward=2;reference=3", "advantage": "grpo", "policy_loss": "gspo",
    "loss_aggregation": "seq-mean-token-sum", "kl_in": "loss", "kl_estimator": "k3", "kl_controller": "adaptive",
    "group_filter": "correct", "rollout_correction": "mis", "rollout_correction_level": "geometric",
    "old_logprobs": "rollout", "rollout_rejection": "mean-abs=0.5", "eval_k": "1,2",
    "kl_horizon": 5000.0, "router_replay": "rollout", "tokenizer_type": "HuggingFaceTokenizer", "reward": "length",
    "reward_ensemble": "min", "reward_cosine": "2,1,-10,0,-10", "evals": "a=x b=y", "pool_bounds": "0.1,0.9",
    "pool_weights": "0,1,0.5", "group_filter_range": "0.2,0.8", "rollout_server": "http://x:8000",
    "reward_url": "http://x", "reward_model": "x", "rollout_dispatch": "static",
    "over_sampling": 1.5, "lora_targets": "q_proj", "alarms": "actor/ppo_kl > 1: stop", "on_save_failure": "continue",
    "credit": "turns", "tune": "off", "kernels": "blas", "profile_steps": "2-3", "trackers": "none",
    "branch_samples": 3, "bos": "never", "reward_failure": "fallback", "decode_graphs": "off",
    "preference_loss": "rpo", "preference_label_smoothing": 0.25,
    "generation_schedule": "recorded", "distill": "loss", "teacher": "self", "distill_divergence": "forward",
    "distill_beta": 0.25, "teacher_context": "sibling", "hf_mtp": "drop",
    "stop": "</a>", "stop_token_ids": "5,7", "tool_call_parser": "glm", "thinking_budget_text": "</think>",
}  # fmt: skip
REQUIRED = {
    "target_eval_loss": "--eval-interval 1", "target_eval_accuracy": "--eval-interval 1",
    "reward_model": "--reward model", "reward_pattern": "--reward regex", "reward_url": "--reward remote",
    "export_hf": "--save y", "save_rollouts": "--save y", "profile_steps": "--save y", "save_memory": "--save y",
    "teacher_context": CONTEXT.replace("--teacher-context sibling", ""),
    "load_rollouts": "--debug-train-only", "debug_train_only": "--load-rollouts x",
    "export_peft": "--save y", "partial_rollouts": "--over-sampling 2 --rollout-correction tis",
    "dynamic_sampling": "--group-filter reward", "generation_lag": "--rollout-correction tis",
    "generation_schedule": "--generation-lag 1 --rollout-correction tis --save y",
    "replay_schedule": "--generation-lag 1 --rollout-correction tis",
    "kl_controller": "--kl-target 1",
    "lora_alpha": "--lora-rank 4", "lora_rslora": "--lora-rank 4", "lora_targets": "--lora-rank 4",
    "credit": "--environment x:y --advantage rloo", "thinking_budget_text": "--thinking-budget 9",
    "eval_responses": "--eval-prompts x --eval-temperature 1",
    "eval_k": "--eval-prompts x --eval-temperature 1 --eval-responses 2", "mtp_drafts": "--mtp-train",
}  # fmt: skip

OUTSIDE = {
    "reward_fallback": ("nan", "inf"),
    "reward_cosine": ("1,2,3,4", "1,2,3,4,inf"),
    "evals": ("x", "a=x a=y", "=x"),
    "pool_bounds": ("0.9,0.1", "0,1.5", "0", "nan,1", "0,0.5,1"),
    "pool_weights": ("0,0,0", "1,0,1", "1,-1,1", "1,1", "nan,1,1", "1,inf,1", "1e-9,1,1"),
    "group_filter_range": ("1,0", "0,inf", "x,1"),
    "stop": ('["a"', "[]"),
    "thinking_budget_text": ("",),
    "tracker_project": ("a/b", " "),
    "tracker_run": ("a:b", " "),
    "reward_url": ("localhost:80/x", "ftp://host/x", "http://", "http://[::1", "http://host:x"),
    "rollout_server": ("ftp://x", "host:8000"),
}  # values that are rejected, where -1 is not


def named_conditions() -> dict[Condition, str]:
    """The conditions of all fields and roles, by what the source calls them."""
    modules = (conditions, data, *settings.TOPICS)
    found = {value: name for module in modules for name, value in vars(module).items() if isinstance(value, Condition)}
    for kind, make, options in (
        ("estimator", algorithm.of_estimator, [option.name for option in dataclasses.fields(AdvantageOptions)]),
        ("preference", preferences.of_preference, PreferenceOptions._fields),
        ("reward", rewards.of_reward, expression.NAMES),
    ):
        found = {make(option): f"{kind}:{option}" for option in options} | found
    return found


def condition_of(field) -> str | None:
    """The name of the condition under which a flag has an effect."""
    condition = field.metadata["when"]
    return None if condition is None else named_conditions()[condition]


def flag_of(field) -> str:
    """`--kl-target` of the field `kl_target`."""
    return "--" + field.name.replace("_", "-")


def value_of(field):
    """A value that is allowed, and not the default."""
    kind = next(t for t in (int, float, bool, str) if t.__name__ in str(field.type).replace("<class '", ""))
    return VALUES.get(field.name, {int: 2, float: 0.5, bool: not field.default, str: "text"}[kind])


def required_flags(field, program: str = "rl") -> list[str]:
    """Flags without which this one has no effect in a program."""
    when = condition_of(field) or ""
    if program == "serve":
        return HOLDS[when].split() if when == "PREFIXES" else []
    if when.startswith("preference:") and program == "rl":
        return [*ONLINE.split(), *HOLDS[when].split()]
    return REQUIRED.get(
        field.name, "" if (when, program) == ("PREFERENCES", "preference") else HOLDS.get(when, "")
    ).split()
