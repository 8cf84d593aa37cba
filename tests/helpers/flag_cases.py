"""For every flag an allowed value, and the flags without which it has no effect."""

import dataclasses

from megarl.flags.settings import Settings

FOLDERS = (
    "hf_model",
    "reward_hf_model",
    "judge_hf_model",
    "lora_adapter",
    "teachers",
)  # read at once: see test_hf_models.py, test_peft_files.py, test_several_teachers.py
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

# Condition of `combinations.CONDITIONS` -> flags under which it holds, and flags under which it does not.
HOLDS = {
    "estimator:gamma": "", "estimator:lam": "", "estimator:group_std": "--advantage grpo", "estimator:whiten": "",
    "estimator:length_alpha": "", "environment": "--environment x:y", "tool_calls": "--environment x:y",
    "thinks": "--thinking-budget 9",
    "workers": "--environment x:y", "branches": "--environment x:y --branch-turns 1", "listens": "--agent-sessions",
    "critic": "", "reference": "", "kl": "", "refreshes": "--reference-update-interval 2",
    "distill": "--distill loss", "distill-loss": "--distill loss", "teacher": "--distill loss",
    "jsd": "--distill loss --distill-divergence jsd", "context": CONTEXT,
    "average": "--ema-decay 0.5 --eval-prompts x",
    "baselines": "--advantage remax", "norm": "--loss-aggregation seq-mean-token-sum-norm",
    "adaptive": "--kl-controller adaptive --kl-target 1", "correction": "--rollout-correction tis",
    "icepop": "--rollout-correction icepop --rollout-correction-floor 0.1",
    "routes": "--router-replay rollout",
    "partial": "--partial-rollouts --over-sampling 2 --rollout-correction tis",
    "rounds": "--dynamic-sampling --group-filter reward", "overlong": "--overlong-buffer 4",
    "sampled": "--eval-prompts x --eval-temperature 1", "evaluation": "--eval-prompts x",
    "best": "--eval-prompts x --eval-interval 1 --save y", "load": "--load x", "saved": "--save y",
    "keep_last": "--save y --keep-last 1", "exported": "--save y --export-hf", "rollout_server": "--rollout-server http://x",
    "serve_policy": "--serve-policy", "engine": "", "prefixes": STATES, "evaluates": "",
    "trained": "", "ahead": "",
    "profile": "--save y --profile-steps 2-3",
    "tracked": "--save y --trackers wandb",
    "model": "--reward model --reward-model x",
    "judge": "--reward judge --judge-config x --judge-load y", "scoring_model": "--reward model --reward-model x",
    "fallible": "",
    "ensemble": "--reward model --reward-model x,y", "regex": "--reward regex --reward-pattern x",
    "format": "--reward format", "length": "--reward length", "code": "--reward code",
    "cosine": "--reward 0*exact-match+cosine", "repetition": "--reward repetition",
    "range": "--group-filter range", "pools": "--pool-bounds 0.1,0.9",
    "remote": "--reward remote --reward-url http://x", "local": "", "margin": "",
    "concurrent": "--reward remote --reward-url http://x",
    "preference": ONLINE,
    "preference:beta": "", "preference:label_smoothing": "", "preference:gamma": "--preference-loss simpo",
    "preference:coefficient": "--preference-loss rpo", "labels": "--preference-loss kto",
    "preference:desirable_weight": "--preference-loss kto", "preference:undesirable_weight": "--preference-loss kto",
}  # fmt: skip
FAILS = {
    "estimator:whiten": ONLINE, "preference": "",
    "estimator:gamma": "--advantage grpo", "estimator:lam": "--advantage reinforce++", "estimator:group_std": "",
    "estimator:length_alpha": "--advantage grpo",
    "environment": "", "workers": "--agent-sessions", "branches": "--environment x:y", "listens": "",
    "distill": "", "distill-loss": "--distill reward", "jsd": "--distill loss", "teacher": "",
    "context": "--distill loss",
    "critic": "--advantage grpo", "reference": "--kl-coefficient 0", "kl": "--kl-coefficient 0", "refreshes": "",
    "average": "--ema-decay 0.5",
    "baselines": "",
    "norm": "", "adaptive": "", "correction": "", "icepop": "--rollout-correction mis",
    "routes": "--router-replay old-logprob",
    "partial": "--over-sampling 2", "ahead": "--debug-rollout-only",
    "rounds": "--group-filter reward", "overlong": "", "evaluation": "", "best": "--eval-prompts x --eval-interval 1",
    "load": "", "saved": "", "tracked": "--save y", "keep_last": "--save y", "exported": "--save y",
    "rollout_server": "", "serve_policy": "", "tool_calls": "", "thinks": "",
    "engine": "--debug-train-only --load-rollouts x", "prefixes": "", "evaluates": "--debug-rollout-only",
    "trained": "--debug-rollout-only", "profile": "",
    "model": "", "judge": "", "scoring_model": "", "fallible": "--reward model --reward-model x",
    "ensemble": "--reward model --reward-model x", "regex": "", "format": "", "length": "", "code": "",
    "cosine": "", "repetition": "", "range": "--group-filter reward", "pools": "",
    "margin": "--preference-loss ipo", "preference:beta": "--preference-loss orpo",
    "preference:label_smoothing": "--preference-loss ipo", "preference:gamma": "", "preference:coefficient": "",
    "labels": "", "preference:desirable_weight": "", "preference:undesirable_weight": "",
    "remote": "", "concurrent": "", "local": "--reward remote --reward-url http://x",
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
    "reward_model": "--reward model", "reward_pattern": "--reward regex", "reward_url": "--reward remote",
    "export_hf": "--save y", "rollout_bank": "--save y", "save_rollouts": "--save y", "profile_steps": "--save y",
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


def flag_of(field) -> str:
    """`--kl-target` of the field `kl_target`."""
    return "--" + field.name.replace("_", "-")


def value_of(field):
    """A value that is allowed, and not the default."""
    kind = next(t for t in (int, float, bool, str) if t.__name__ in str(field.type).replace("<class '", ""))
    return VALUES.get(field.name, {int: 2, float: 0.5, bool: not field.default, str: "text"}[kind])


def required_flags(field, program: str = "rl") -> list[str]:
    """Flags without which this one has no effect in a program."""
    when = field.metadata["when"] or ""
    if program == "serve":
        return HOLDS[when].split() if when == "prefixes" else []
    if when.startswith("preference:") and program == "rl":
        return [*ONLINE.split(), *HOLDS[when].split()]
    return REQUIRED.get(field.name, "" if (when, program) == ("preference",) * 2 else HOLDS.get(when, "")).split()
