"""megarl's own flags: one place for name, type, default, help, allowed values, programs, and when a flag has an effect.

A field `kl_target` of `Settings` is the flag `--kl-target` and the key `kl-target` of a config file. Numbers in help
texts are arXiv papers. `when` names one of `combinations.CONDITIONS`: a flag that is given where it does not hold has no
effect, which a warning says.
"""

import dataclasses
import math
from collections.abc import Callable

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.estimators import ESTIMATORS
from megarl.algorithms.kl import KL_KINDS
from megarl.algorithms.normalization import ENSEMBLES
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.rollout_correction import CORRECTIONS, LEVELS
from megarl.rewards.expression import NAMES

MODELS = ("actor", "critic", "reward", "reference")  # roles that run a model over packed text
FORMAT = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
REPLAYS = ("none", "old-logprob", "rollout")  # where the routes come from that the actor's training takes
TRAINING, SUPERVISED, WRITING = "rl sft reward", "sft reward", "rl evaluate"  # programs that share flags
ALL = "rl sft reward evaluate"
TOKENIZERS = ("SentencePieceTokenizer", "HuggingFaceTokenizer")


def whole_numbers(text: str) -> tuple[int, ...]:
    """`"1,4,8"` -> (1, 4, 8). ValueError where an item is no whole number above 0."""
    found = tuple(int(item) for item in text.split(","))
    if min(found) < 1:
        raise ValueError(f"{text!r} has a number below 1")
    return found


def _are_whole_numbers(text: str) -> bool:
    try:
        return bool(whole_numbers(text))
    except ValueError:
        return False


def _flag(default, text: str, check: Callable | None = None, allowed: str = "", programs: str = "rl",
          roles: tuple[str, ...] = (), when: str | None = None):  # fmt: skip
    """A field of `Settings`: `check` tells whether a given value is allowed, `allowed` says so in words; `roles` may
    have values of their own, by a prefix to the flag."""
    meta = {"help": text, "check": check, "allowed": allowed, "programs": programs.split(), "roles": roles}
    return dataclasses.field(default=default, metadata=meta | {"when": when})


def _positive(default, text, **kw):
    return _flag(default, text, lambda v: v > 0, "a number above 0", **kw)


def _not_negative(default, text, **kw):
    return _flag(default, text, lambda v: v >= 0, "0 or more", **kw)


def _share(default, text, **kw):
    return _flag(default, text, lambda v: 0 <= v <= 1, "between 0 and 1", **kw)


def _one_of(default, names: tuple[str, ...], text, **kw):
    return _flag(default, text, lambda v: v in names, "one of " + ", ".join(names), **kw)


@dataclasses.dataclass(frozen=True)
class Settings:
    """megarl's own flags with their values."""

    role_map: str | None = _flag(None, "ranks of each role: 'actor=0-3;critic=4;…'; default: all", programs=WRITING)
    prompts: str | None = _flag(None, "JSONL of training prompts", programs=TRAINING)
    eval_prompts: str | None = _flag(None, "JSONL of held-out prompts", programs=ALL)
    tokenizer_type: str = _one_of("SentencePieceTokenizer", TOKENIZERS, "kind of tokenizer; --reward-…: the reward"
                                  " model's own", programs=ALL, roles=("reward",))  # fmt: skip
    tokenizer_model: str | None = _flag(None, "file (SentencePiece) or folder (Hugging Face) of the tokenizer",
                                        programs=ALL, roles=("reward",))  # fmt: skip
    chat_template: str | None = _flag(None, "Jinja file, 'tokenizer': the one that it brings, or 'none': plain text",
                                      programs=ALL, roles=("reward",))  # fmt: skip
    # Rewards.
    reward: str = _flag("exact-match", "weighted sum, as 'model+0.2*format' (weight 0: measured only), of "
                        f"{', '.join(NAMES)}, or package.module:function", programs=WRITING)  # fmt: skip
    reward_model: str | None = _flag(None, "folder of a run of train_reward; several with commas: an ensemble",
                                     programs=WRITING, when="model")  # fmt: skip
    reward_ensemble: str = _one_of("mean", ENSEMBLES, "how the models' scores become one (2310.02743)",
                                   programs=WRITING, when="ensemble")  # fmt: skip
    reward_max_length: int | None = _positive(None, "tokens that the reward model reads at most, of the end of a longer"
                                              " text; default both lengths together", programs=WRITING,
                                              when="model")  # fmt: skip
    reward_normalize: bool = _flag(False, "the model's score to mean 0, deviation 1 of all scores so far", when="model")
    reward_clip: float | None = _positive(None, "largest size of the model's score (1707.06347)", when="model")
    reward_pattern: str | None = _flag(None, "regex: expression to find in the response; its first group, or all, is"
                                       " compared with the answer", programs=WRITING, when="regex")  # fmt: skip
    reward_format: str = _flag(FORMAT, "format: expression that the whole response must match", programs=WRITING,
                               when="format")  # fmt: skip
    reward_length: int = _positive(256, "length: tokens of a response up to which it is short", programs=WRITING,
                                   when="length")  # fmt: skip
    reward_url: str | None = _flag(None, "remote: address that scores samples by HTTP", programs=WRITING, when="remote")
    reward_retries: int = _not_negative(3, "remote: further attempts, with back-off", programs=WRITING, when="remote")
    reward_concurrency: int = _positive(8, "remote: requests at a time", programs=WRITING, when="remote")
    reward_memory_mb: int = _positive(1024, "code: memory of a checked program, MiB", programs=WRITING, when="code")
    reward_timeout: float = _positive(30.0, "seconds that a verifier has for a sample", programs=WRITING,
                                      when="verifiers")  # fmt: skip
    reward_workers: int = _not_negative(0, "processes of each scoring rank for its verifiers; 0: its own", when="local",
                                        programs=WRITING)  # fmt: skip
    reward_fallback: float = _flag(0.0, "score of a sample whose verifier failed", math.isfinite, "a finite number",
                                   programs=WRITING, when="verifiers")  # fmt: skip
    reward_max_failures: float = _share(0.1, "share of samples that a verifier may fail on before the run stops",
                                        programs=WRITING, when="verifiers")  # fmt: skip
    # Preferences (train_reward).
    preference_margin: float = _not_negative(0.0, "margin of each pair, added to its own (2307.09288 eq. 2)",
                                             programs="reward")  # fmt: skip
    centring_coefficient: float = _not_negative(0.0, "weight of (chosen + rejected)² (2312.09244)", programs="reward")
    target_eval_accuracy: float | None = _share(None, "end the run once so many held-out pairs are in order",
                                                programs="reward")  # fmt: skip
    # Writing.
    prompts_per_step: int = _positive(16, "prompts of a step")
    samples_per_prompt: int = _positive(4, "responses sampled for each prompt: a group")
    max_prompt_length: int = _positive(512, "longest prompt, tokens", programs=ALL)
    max_response_length: int = _positive(512, "longest response, tokens", programs=ALL)
    temperature: float = _positive(1.0, "softmax temperature of rollout and of all log-probs")
    top_k: int = _not_negative(0, "sample from the k likeliest tokens; 0: all", programs=WRITING, when="sampled")
    top_p: float = _flag(1.0, "sample from the nucleus of this mass (1904.09751)", lambda v: 0 < v <= 1,
                         "above 0, at most 1", programs=WRITING, when="sampled")  # fmt: skip
    rollout_buffer_gb: float = _positive(0.25, "KV cache of each rollout rank, GiB", programs=WRITING)
    rollout_max_requests: int = _positive(256, "requests decoded together on a lane, at least 4", programs=WRITING)
    rollout_dispatch: str = _one_of("dynamic", ("static", "dynamic"), "requests are dealt to lanes before, or each lane"
                                    " takes the next as it has room", programs=WRITING)  # fmt: skip
    rollout_prefix_caching: bool = _flag(False, "prefill what requests begin with alike once", programs=WRITING)
    rollout_chunked_prefill: bool = _flag(False, "prefill a long prompt over several steps", programs=WRITING)
    one_step_off: bool = _flag(False, "the rollout writes a step's batch while the step before is learnt")
    verify_weights: bool = _flag(False, "compare checksums after each transfer of weights to the rollout",
                                 programs=WRITING)  # fmt: skip
    # Which of what was written is learnt from, and its reward.
    group_filter: str = _one_of("none", ("none", "reward", "correct"),
                                "drop groups whose rewards, or verdicts, are all equal (2503.14476 §3.2)")  # fmt: skip
    over_sampling: float = _flag(1.0, "begin so many times the prompts, keep the groups whose longest response is the"
                                 " shortest, stop there", lambda v: 1 <= v < math.inf, "1 or more")  # fmt: skip
    partial_rollouts: bool = _flag(False, "groups that over-sampling stops go on in the next round (2501.12599 §2.6)")
    max_staleness: int = _not_negative(0, "most steps that tokens of a group may be behind when it goes on, else it is"
                                       " dropped; 0: no limit", when="partial")  # fmt: skip
    dynamic_sampling: bool = _flag(False, "write to more prompts until the batch is full (DAPO, 2503.14476 §3.2)")
    max_sampling_rounds: int = _positive(10, "at most so many rounds a step; then the batch waits", when="rounds")
    overlong_buffer: int = _not_negative(0, "last tokens of a response over which a penalty grows (2503.14476 eq. 13)")
    overlong_penalty: float = _positive(1.0, "penalty at --max-response-length", when="overlong")
    # Advantages.
    advantage: str = _flag("gae", f"{', '.join(ESTIMATORS)}, or a plug-in")
    gamma: float = _share(1.0, "discount γ (1506.02438)", when="estimator:gamma")
    gae_lambda: float = _share(0.95, "λ of GAE (1506.02438)", when="estimator:lam")
    group_std: bool = _flag(True, "divide by the group's deviation (2402.03300); false: Dr. GRPO (2503.20783)",
                            when="estimator:group_std")  # fmt: skip
    whiten_advantages: bool | None = _flag(None, "to mean 0, variance 1 over the batch; default: the estimator's own",
                                           when="estimator:whiten")  # fmt: skip
    greedy_baseline: bool = _flag(False, "write and score a greedy response to each prompt, too (ReMax, 2310.10505)",
                                  when="baselines")  # fmt: skip
    # Policy loss; the options of each stand in its file (`algorithms.policy_losses`).
    policy_loss: str = _flag("ppo-clip", f"{', '.join(POLICY_LOSSES)}, or a plug-in")
    ppo_epochs: int = _positive(1, "passes over a step's batch (1707.06347)")
    minibatch_size: int | None = _positive(None, "sequences of an update; default the whole batch")
    loss_aggregation: str = _one_of("token-mean", AGGREGATIONS, "how token losses become one number")
    loss_norm_length: float | None = _positive(None, "length that a sum is divided by (Dr. GRPO, 2503.20783);"
                                               " default --max-response-length", when="norm")  # fmt: skip
    entropy_coefficient: float = _not_negative(0.0, "weight of the entropy bonus")
    value_clip_range: float = _positive(0.2, "clip range of the value loss", when="critic")
    critic_warmup_steps: int = _not_negative(0, "first steps in which only the critic learns", when="critic")
    # KL to the reference.
    kl_coefficient: float = _not_negative(0.05, "β of the KL to the reference (2203.02155); 0: none")
    kl_in: str = _one_of("reward", ("reward", "loss"), "where the KL is paid: 2203.02155, or 2402.03300", when="kl")
    kl_estimator: str = _one_of("k1", KL_KINDS, "of the KL (joschu.net/blog/kl-approx.html); k1+, k3+: gradient of k2",
                                when="kl")  # fmt: skip
    kl_controller: str = _one_of("fixed", ("fixed", "adaptive"), "of β (1909.08593 §2.2)", when="kl")
    kl_target: float | None = _positive(None, "KL per response that β is adapted to (1909.08593)", when="adaptive")
    kl_horizon: float = _positive(10000, "horizon of the adaptive β, responses (1909.08593)", when="adaptive")
    # Rollout correction.
    rollout_correction: str = _one_of("none", CORRECTIONS, "of the loss, for the ratio π_old/μ to the writing policy")
    rollout_correction_level: str = _one_of("token", LEVELS, "what the ratio is of, applied or only measured")
    rollout_correction_cap: float = _positive(2.0, "largest ratio", when="correction")
    rollout_correction_floor: float | None = _positive(None, "smallest ratio of icepop", when="icepop")
    # Routes of mixtures of experts.
    router_replay: str = _one_of("none", REPLAYS, "experts in the actor's training: those that the first pass (R2), or"
                                 " the rollout (R3), chose (2510.11370)")  # fmt: skip
    router_replay_reference: bool = _flag(False, "the reference takes the rollout's routes, too", when="routes")
    router_probe_interval: int = _not_negative(0, "steps between measurements of the log-prob gap with and without"
                                               " replay; 0: none", when="routes")  # fmt: skip
    max_tokens_per_microbatch: int = _positive(16384, "most tokens of a micro-batch; per role", programs=TRAINING,
                                               roles=MODELS)  # fmt: skip
    # Evaluation.
    eval_interval: int = _not_negative(0, "steps between evaluations; 0: none", programs=TRAINING)
    eval_samples: int = _positive(256, "held-out prompts of an evaluation", programs=ALL, when="evaluation")
    eval_responses: int = _positive(1, "responses to each held-out prompt", programs=WRITING, when="evaluation")
    eval_temperature: float = _not_negative(0.0, "temperature of an evaluation; 0: greedy", programs=WRITING,
                                            when="evaluation")  # fmt: skip
    eval_k: str | None = _flag(None, "k of pass@k and maj@k, as '1,4,8' (2107.03374)", _are_whole_numbers,
                               "whole numbers above 0 with commas", programs=WRITING, when="evaluation")  # fmt: skip
    keep_best: bool = _flag(True, "save a checkpoint at the best evaluation, too", when="best")
    target_eval_loss: float | None = _positive(None, "end the run once the evaluation loss is so low",
                                               programs=SUPERVISED)  # fmt: skip
    # The run.
    offload: bool = _flag(False, "keep a role's memory on the host between its turns; per role", roles=MODELS)
    train_iters: int = _positive(100, "steps of the run", programs=TRAINING)
    seed: int = _not_negative(1, "seed of everything random", programs=ALL)
    deterministic: bool = _flag(False, "deterministic kernels; an error where there is none", programs=ALL)
    save: str | None = _flag(None, "folder of the run: metrics, samples, report, checkpoints", programs=ALL)
    save_interval: int = _not_negative(0, "steps between checkpoints; 0: only at the end", programs=TRAINING)
    load: str | None = _flag(None, "run folder to go on from, or whose checkpoint is evaluated", programs=ALL)

    @property
    def sequences_per_step(self) -> int:
        """Responses in the batch of a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step whose batch is full."""
        sequences = self.sequences_per_step
        return self.ppo_epochs * -(-sequences // (self.minibatch_size or sequences))

    def updates_on_policy(self, sequences: int) -> bool:
        """Whether a batch's one update is the first to run the actor over it: nothing asks for log-probs before."""
        is_only_update = self.ppo_epochs == 1 and (self.minibatch_size or sequences) >= sequences
        return is_only_update and not (self.kl_in == "reward" and self.kl_coefficient > 0)

    @property
    def sampled_fields(self) -> tuple[str, ...]:
        """Fields that sampling gives a batch beyond those that writing gives."""
        verdicts = ("scores", "correct") if self.group_filter != "none" else ()
        return verdicts + (("baseline_scores",) if self.greedy_baseline else ())
