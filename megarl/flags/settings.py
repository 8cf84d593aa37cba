"""megarl's own flags: name, type, default, help, allowed values, programs, and when each has an effect.

A field `kl_target` of `Settings` is the flag `--kl-target` and the key `kl-target` of a config file. Numbers in help
texts are arXiv papers. `when` names one of `combinations.CONDITIONS`: a flag given where it does not hold has no
effect, and a warning says so.
"""

import dataclasses
import functools
import math
from typing import Any

from megarl.algorithms.estimators import ESTIMATORS, NO_ADVANTAGE
from megarl.algorithms.normalization import ENSEMBLES
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.flags.correction_settings import CorrectionSettings
from megarl.flags.data_settings import DataSettings
from megarl.flags.debug_settings import DebugSettings
from megarl.flags.distill_settings import LOSS, REWARD, SIBLING, DistillSettings
from megarl.flags.environment_settings import EnvironmentSettings
from megarl.flags.fields import (
    ALL,
    DATA,
    GENERATING,
    ROLLOUT,
    SUPERVISED,
    TRAINING,
    address,
    flag,
    fraction,
    not_negative,
    one_of,
    parse_ints,
    parses,
    positive,
)
from megarl.flags.judge_settings import JudgeSettings
from megarl.flags.lora import ALL_LINEAR, TARGETS, are_targets
from megarl.flags.loss_settings import LossSettings
from megarl.flags.pool_settings import PoolSettings
from megarl.flags.preference_settings import PreferenceSettings
from megarl.flags.reference_settings import ReferenceSettings
from megarl.flags.server_settings import ServerSettings
from megarl.flags.stop_settings import StopSettings
from megarl.flags.tracker_settings import TrackerSettings
from megarl.measurements import MAX_VALUE
from megarl.observe.alarms import DEFAULT_ALARMS, parse_alarms
from megarl.rewards import expression
from megarl.rewards.shaping import parse_cosine

MODELS = ("actor", "critic", "reward", "reference", "teacher")  # roles that run a model over packed sequences
TRAINED = ("actor", "critic")
FORMAT = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
SCHEDULES = ("fixed", "recorded")
MAX_LAG = 32  # of `--generation-lag`; ranks may be that many steps apart
REWARD_MODEL: dict[str, Any] = {"programs": GENERATING, "when": "model"}
FALLIBLE: dict[str, Any] = {"programs": GENERATING, "when": "fallible"}
FACTORS: dict[str, Any] = {"programs": TRAINING, "roles": TRAINED}
REPLAYS = ("none", "old-logprob", "rollout")  # source of the expert routes that the actor's training replays


@dataclasses.dataclass(frozen=True)
class Settings(
    DataSettings, PoolSettings, ReferenceSettings, PreferenceSettings, EnvironmentSettings, ServerSettings,
    LossSettings, CorrectionSettings, TrackerSettings, DebugSettings, DistillSettings, JudgeSettings,
    StopSettings,
):  # fmt: skip
    """The values of megarl's own flags."""

    role_map: str | None = flag(None, "ranks per role, as 'actor=0-3;critic=4;…', or 'actor=nodes 0-1;…'; default:"
                                 " every role on all ranks", programs=GENERATING)  # fmt: skip
    hf_model: str | None = flag(None, "Hugging Face folder: gives architecture, weights, tokenizer, chat template and"
                                 " end tokens; may differ per role", programs=ALL,
                                 roles=("actor", "critic", "reference", "teacher"))  # fmt: skip
    # Rewards.
    reward: str = flag("exact-match", "weighted sum of reward terms, as 'model+0.2*format' (weight 0: logged, not"
                        f" added); terms: {', '.join(expression.NAMES)}, or package.module:function; default with"
                        " --environment: environment, with --distill: none, without any term",
                        programs=GENERATING)  # fmt: skip
    reward_model: str | None = flag(None, "run folder of train_reward; several, separated by commas, form an ensemble",
                                     **REWARD_MODEL)  # fmt: skip
    reward_hf_model: str | None = flag(None, "Hugging Face folder of a reward model (sequence classification with one"
                                        " label); with --reward-model it gives all but the weights",
                                        **REWARD_MODEL)  # fmt: skip
    reward_ensemble: str = one_of("mean", ENSEMBLES, "how an ensemble's scores are combined: mean or min (2310.02743)",
                                   programs=GENERATING, when="ensemble")  # fmt: skip
    reward_max_length: int | None = positive(None, "maximum tokens of a sequence that the reward model reads; longer"
                                              " sequences keep their end; default: --max-prompt-length +"
                                              " --max-response-length", **REWARD_MODEL)  # fmt: skip
    reward_normalize: bool = flag(False, "normalize the reward model's score by the running mean and standard"
                                   " deviation of all its scores", when="model")  # fmt: skip
    reward_clip: float | None = positive(None, "clip the reward model's score to ± this value (1707.06347); default:"
                                          " no clipping", when="model")  # fmt: skip
    reward_pattern: str | None = flag(None, "regex: pattern to search in the response; its first group, or the whole"
                                       " match, is compared with the answer", programs=GENERATING,
                                       when="regex")  # fmt: skip
    reward_format: str = flag(FORMAT, "format: pattern that the whole response must match", programs=GENERATING,
                               when="format")  # fmt: skip
    reward_length: int = positive(256, "length: tokens up to which a response gets the full reward",
                                   programs=GENERATING, when="length")  # fmt: skip
    reward_cosine: str = flag("1,0.5,-1,-0.5,-1", "cosine: rewards of a right answer at no length and at"
                               " --max-response-length, of a wrong one at both, and of a truncated response"
                               " (2502.03373)", parses(parse_cosine), "five numbers with commas",
                               programs=GENERATING, when="cosine")  # fmt: skip
    reward_ngram: int = positive(3, "repetition: length of the n-grams, tokens", programs=GENERATING,
                                  when="repetition")  # fmt: skip
    reward_url: str | None = address("remote: URL of the HTTP scoring service", programs=GENERATING, when="remote")
    reward_retries: int = not_negative(3, "remote: retries of a failed request, with back-off", programs=GENERATING,
                                        when="remote")  # fmt: skip
    reward_concurrency: int = positive(8, "concurrent requests of remote, and calls of an async plug-in",
                                        programs=GENERATING, when="concurrent")  # fmt: skip
    reward_memory_mb: int = positive(1024, "code: memory limit of a checked program, MiB", programs=GENERATING,
                                      when="code")  # fmt: skip
    reward_timeout: float = positive(30.0, "time limit of a verifier for one sample, seconds", **FALLIBLE)
    reward_workers: int = not_negative(0, "worker processes per scoring rank for verifiers; 0: run them in the rank's"
                                        " process", when="local", programs=GENERATING)  # fmt: skip
    reward_failure: str = one_of("drop", ("drop", "fallback"), "a response whose verifier or judge failed: drop (it"
                                  " counts in no group and no loss) or fallback (it gets --reward-fallback)",
                                  **FALLIBLE)  # fmt: skip
    reward_fallback: float = flag(0.0, "score of a response whose verifier or judge failed; evaluation always"
                                   " uses it", lambda v: abs(v) <= MAX_VALUE, f"-{MAX_VALUE:g} to {MAX_VALUE:g}",
                                   **FALLIBLE)  # fmt: skip
    reward_max_failures: float = fraction(0.1, "fraction of the latest samples that may fail in a verifier or the judge"
                                           " before the run stops; 0: none", **FALLIBLE)  # fmt: skip
    # Generation.
    prompts_per_step: int = positive(16, "prompts per step")
    samples_per_prompt: int = positive(4, "responses sampled per prompt (the group size)")
    max_prompt_length: int = positive(512, "maximum prompt length, tokens", programs=ALL)
    max_response_length: int = positive(512, "maximum response length, tokens", programs=ALL)
    temperature: float = positive(1.0, "softmax temperature of the rollout and of all log-probs")
    top_k: int = not_negative(0, "sample from the k most likely tokens; 0: all tokens", programs=GENERATING,
                               when="sampled")  # fmt: skip
    top_p: float = flag(1.0, "nucleus sampling: probability mass to sample from (1904.09751); 1: all",
                         lambda v: 0 < v <= 1, "above 0, at most 1", programs=GENERATING, when="sampled")  # fmt: skip
    min_p: float = flag(0.0, "sample from tokens with at least this share of the most likely one's probability"
                         " (2407.01082); 0: all", lambda v: 0 <= v <= 1, "from 0 to 1", programs=GENERATING,
                         when="sampled")  # fmt: skip
    rollout_buffer_gb: float = positive(0.25, "KV cache of each rollout rank, GiB", programs=ROLLOUT, when="engine")
    rollout_max_requests: int = positive(256, "maximum requests that a rollout replica decodes together, at least 4",
                                          programs=ROLLOUT, when="engine")  # fmt: skip
    rollout_dispatch: str = one_of("dynamic", ("static", "dynamic"), "static: requests are assigned to replicas up"
                                    " front; dynamic: each replica takes the next when it has room",
                                    programs=GENERATING, when="engine")  # fmt: skip
    rollout_prefix_caching: bool = flag(False, "prefill a prefix that requests share only once, and in each turn of an"
                                        " episode only what is new", programs=ROLLOUT,
                                         when="engine")  # fmt: skip
    rollout_state_snapshots: int | None = flag(None, "recurrent states at ends of prompts that --rollout-prefix-caching"
                                               " keeps on each replica; default: --rollout-max-requests",
                                               lambda v: v is None or v > 0, "a number above 0", programs=ROLLOUT,
                                               when="prefixes")  # fmt: skip
    rollout_chunked_prefill: bool = flag(False, "prefill a long prompt in chunks over several engine steps",
                                          programs=ROLLOUT, when="engine")  # fmt: skip
    speculative_rollout: bool = flag(False, "decode steps also read drafted tokens, taken from siblings and earlier"
                                      " responses, and read what siblings share once; text and log-probs stay the"
                                      " same to the bit", when="engine")  # fmt: skip
    rollout_bank: str | None = flag(None, "folder that keeps the finished responses of steps without a checkpoint, so"
                                     " that a run that was killed generates only the rest", when="engine")  # fmt: skip
    rollout_server: str | None = address("address of a generation server (megarl.serve) that writes the responses",
                                      programs="evaluate")  # fmt: skip
    rollout_server_key_file: str | None = flag(None, "file with the server's API key", programs="evaluate",
                                          when="rollout_server")  # fmt: skip
    generation_lag: int = flag(0, "batches that generation may be ahead of training; responses are as many updates old",
                               lambda v: 0 <= v <= MAX_LAG, f"0 to {MAX_LAG}", when="trained")  # fmt: skip
    generation_schedule: str = one_of("fixed", SCHEDULES, "which weights, at most --generation-lag steps old, draw a"
                                       " token: those of its round (fixed), or the newest there are (recorded), which"
                                       " is written to schedule/ in --save; over-sampling then takes the first groups",
                                       when="ahead")  # fmt: skip
    replay_schedule: str | None = flag(None, "follow the schedule of another run, whose folder this is; needs its"
                                        " settings, in any layout", when="ahead")  # fmt: skip
    verify_weights: bool = flag(False, "compare checksums after each weight sync to the rollout",
                                 programs=ROLLOUT, when="engine")  # fmt: skip
    # Selection of generated groups, and length penalty.
    group_filter: str = one_of("none", ("none", "reward", "correct", "range"), "drop groups whose rewards (reward) or"
                                " verdicts (correct) are all equal, or whose mean reward is not inside"
                                " --group-filter-range (range); none: keep all (2503.14476 §3.2)")  # fmt: skip
    over_sampling: float = flag(1.0, "start this many times the prompts, keep the groups whose longest responses are"
                                 " shortest and stop the others; 1: none", lambda v: 1 <= v < math.inf,
                                 "1 or more")  # fmt: skip
    partial_rollouts: bool = flag(False, "continue the groups that over-sampling stopped in the next round"
                                   " (2501.12599 §2.6)")  # fmt: skip
    max_staleness: int = not_negative(0, "drop a stopped group whose oldest token is more than this many steps old;"
                                       " 0: no limit", when="partial")  # fmt: skip
    dynamic_sampling: bool = flag(False, "generate for further prompts until the batch is full after filtering"
                                   " (DAPO, 2503.14476 §3.2)")  # fmt: skip
    max_sampling_rounds: int = positive(10, "maximum sampling rounds per step; an incomplete batch then waits for the"
                                         " next step", when="rounds")  # fmt: skip
    overlong_buffer: int = not_negative(0, "tokens before --max-response-length over which the length penalty grows"
                                         " (2503.14476 eq. 13); 0: no penalty")  # fmt: skip
    overlong_penalty: float = positive(1.0, "penalty of a response of --max-response-length tokens", when="overlong")
    mask_truncated_responses: bool = flag(False, "exclude responses that --max-response-length truncated from the"
                                           " losses of actor and critic (2503.14476 §3.4); their rewards stay in"
                                           " the group's baseline")  # fmt: skip
    # Advantages.
    advantage: str = flag("gae", f"advantage estimator: {', '.join(ESTIMATORS)}, or package.module:function;"
                           " default with --distill and no --reward: none")  # fmt: skip
    gamma: float = fraction(1.0, "discount γ (1506.02438)", when="estimator:gamma")
    gae_lambda: float = fraction(0.95, "λ of GAE (1506.02438)", when="estimator:lam")
    gae_length_alpha: float | None = positive(None, "α: advantages of a response of l tokens have λ = 1 − 1/(α·l), the"
                                               " critic's returns --gae-lambda (VAPO, 2504.05118: 0.05)",
                                               when="estimator:length_alpha")  # fmt: skip
    group_std: bool = flag(True, "divide by the group's standard deviation (2402.03300); false: Dr. GRPO (2503.20783)",
                            when="estimator:group_std")  # fmt: skip
    whiten_advantages: bool | None = flag(None, "whiten advantages to mean 0 and variance 1 over the batch; default:"
                                           " as the estimator defines", when="estimator:whiten")  # fmt: skip
    greedy_baseline: bool = flag(False, "generate and score a greedy response to each prompt as a baseline (ReMax,"
                                  " 2310.10505)", when="baselines")  # fmt: skip
    # Router replay (mixture of experts).
    router_replay: str = one_of("none", REPLAYS, "replay expert routes in the actor's training: those of the old"
                                 " log-probs (R2) or of the rollout (R3); none: no replay (2510.11370)")  # fmt: skip
    router_replay_reference: bool = flag(False, "the reference also replays the rollout's routes", when="routes")
    router_probe_interval: int = not_negative(0, "steps between probes of the log-prob gap with and without router"
                                               " replay; 0: none", when="routes")  # fmt: skip
    max_tokens_per_microbatch: int = positive(16384, "maximum tokens of a micro-batch; may differ per role",
                                               programs=TRAINING, roles=MODELS)  # fmt: skip
    # LoRA.
    lora_rank: int | None = flag(None, "train low-rank factors of this rank instead of the weights (2106.09685);"
                                 " may differ per role; default: all weights", lambda v: v > 0,
                                 "a number above 0; leave it out to train all weights", **FACTORS)  # fmt: skip
    lora_alpha: float | None = positive(None, "α of the factors' scale α/rank; default: --lora-rank", **FACTORS)
    lora_rslora: bool = flag(False, "scale the factors by α/√rank (2312.03732)", **FACTORS)
    lora_targets: str | None = flag(None, f"layers with factors, with commas: {', '.join(TARGETS)} (of experts, too),"
                                     f" or {ALL_LINEAR} for all of them, the default", are_targets,
                                     f"{ALL_LINEAR}, or names with commas among {', '.join(TARGETS)}",
                                     **FACTORS)  # fmt: skip
    lora_adapter: str | None = flag(None, "folder of a PEFT adapter: the factors to start from, with their rank, scale"
                                     " and targets; needs --hf-model; a larger --lora-rank adds to theirs",
                                     **FACTORS)  # fmt: skip
    export_peft: bool = flag(False, "also write the factors of each checkpoint as a PEFT adapter, peft/step_N in"
                              " --save; needs --hf-model", programs=TRAINING)  # fmt: skip
    # Evaluation.
    eval_interval: int = not_negative(0, "steps between evaluations; 0: none", programs=TRAINING, when="evaluates")
    eval_samples: int = positive(256, "number of held-out prompts to evaluate", programs=DATA, when="evaluation")
    eval_responses: int = positive(1, "responses per held-out prompt", programs=GENERATING, when="evaluation")
    eval_temperature: float = not_negative(0.0, "sampling temperature of the evaluation; 0: greedy",
                                            programs=GENERATING, when="evaluation")  # fmt: skip
    eval_k: str | None = flag(None, "k of pass@k, mean@k and maj@k, as '1,4,8' (2107.03374); default: 1 and"
                               " --eval-responses, if that is above 1", parses(functools.partial(parse_ints, least=1)),
                               "whole numbers above 0 with commas", programs=GENERATING, when="evaluation")  # fmt: skip
    keep_best: bool = flag(True, "also save a checkpoint after the best evaluation: the highest eval/accuracy, in"
                            " train_sft the lowest eval/loss", programs=TRAINING, when="best")  # fmt: skip
    best_metric: str | None = flag(None, "metric of --keep-best without eval/, of which the highest is the best, as"
                                    " NAME/accuracy; default: accuracy", when="best")  # fmt: skip
    target_eval_loss: float | None = positive(None, "stop the run when the evaluation loss is at most this; default:"
                                               " never", programs=SUPERVISED)  # fmt: skip
    # The run.
    offload: bool = flag(False, "keep a role's memory on the host while the role is idle; may differ per role",
                          roles=MODELS)  # fmt: skip
    train_iters: int = positive(100, "number of training steps", programs=TRAINING)
    seed: int = not_negative(1, "seed of every random stream", programs=ALL)
    alarms: str = flag(DEFAULT_ALARMS, "conditions on metrics and what then happens, as 'actor/ppo_kl > 0.3: skip;"
                        " critic/loss > 10x: warn' (10x: ten times its median); actions: warn, skip the update, stop",
                        parses(parse_alarms), programs=TRAINING)  # fmt: skip
    max_skipped_steps: int = not_negative(20, "end the run after this many steps in a row with a skipped update; 0:"
                                           " never", programs=TRAINING)  # fmt: skip
    kernels: str = one_of("auto", ("auto", "compiled", "onednn", "blas"), "kernels in fp32 on a CPU: compiled ones, or"
                           " PyTorch's operators with products by oneDNN or BLAS; auto: the first of them that all"
                           " ranks can use with a gap of 0", programs=ALL)  # fmt: skip
    exact_rollout: bool = flag(False, "on CUDA, run kernels that make rollout log-probs equal those of training to the"
                                " last bit, at some cost in speed (docs/exactness.md); on a CPU all kernels do, so that"
                                " this changes nothing", programs=ROLLOUT, when="engine")  # fmt: skip
    decode_graphs: str = one_of("auto", ("auto", "off"), "on CUDA, decode steps as CUDA graphs where they can be"
                                 " (auto), or kernel by kernel; on a CPU this changes nothing", programs=ROLLOUT,
                                 when="engine")  # fmt: skip
    deterministic: bool = flag(False, "use deterministic kernels; fails where none exists", programs=ALL)
    save: str | None = flag(None, "run folder for metrics, samples, report and checkpoints", programs=DATA)
    overwrite: bool = flag(False, "start anew in a --save that holds an earlier run, which moves to old-N there;"
                            " without this flag such a start is refused", programs=TRAINING, when="saved")  # fmt: skip
    save_interval: int = not_negative(0, "steps between checkpoints; 0: only at the end", programs=TRAINING)
    async_save: bool = flag(False, "write checkpoints during training, from a copy in host memory",
                             programs=TRAINING, when="saved")  # fmt: skip
    keep_last: int = not_negative(0, "checkpoints to keep besides the best one: the newest; 0: all", programs=TRAINING,
                                   when="saved")  # fmt: skip
    keep_every: int = not_negative(0, "with --keep-last also keep checkpoints of steps that this number divides; 0:"
                                    " none", programs=TRAINING, when="keep_last")  # fmt: skip
    on_save_failure: str = one_of("stop", ("stop", "continue"), "what a run does if a checkpoint cannot be written:"
                                   " stop or continue", programs=TRAINING, when="saved")  # fmt: skip
    exit_grace: float = positive(3600.0, "seconds that the running step has to end after SIGTERM, SIGINT or SIGUSR1,"
                                  " before it is dropped", programs=TRAINING)  # fmt: skip
    export_hf: bool = flag(False, "also write the model of each checkpoint as a Hugging Face folder, hf/step_N in"
                            " --save", programs=TRAINING)  # fmt: skip
    hf_mtp: str = one_of("keep", ("keep", "drop"), "tensors of multi-token prediction in an export: those of the"
                          " --hf-model folder, or none; train_rl can train them", programs=TRAINING,
                          when="exported")  # fmt: skip
    load: str | None = flag(None, "run folder to resume from (training), to evaluate or to serve", programs=ALL)

    @property
    def sequences_per_step(self) -> int:
        """Responses in a step's batch."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def is_scheduled(self) -> bool:
        """Whether weights may change within a round, as the clock decides or as another run's schedule says."""
        return self.generation_schedule == "recorded" or self.replay_schedule is not None

    @property
    def scores_rounds(self) -> bool:
        """Whether all responses of a round are scored before the batch is full."""
        return self.group_filter != "none" or self.pool_bounds is not None

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step with a full batch."""
        sequences = self.sequences_per_step
        return self.ppo_epochs * -(-sequences // (self.minibatch_size or sequences))

    @property
    def minibatch_groups(self) -> int | None:
        """Groups in a mini-batch, which share the prompt's computation; None: the mini-batches of a step are one, or
        each of their responses is drawn by itself."""
        size, group = self.minibatch_size, self.samples_per_prompt
        return None if size is None or size % group else size // group

    @property
    def uneven_minibatches(self) -> tuple[int, int] | None:
        """Responses in the last mini-batch of a full step and in the others; None if they are equally many."""
        size, total = self.minibatch_size, self.sequences_per_step
        rest = 0 if size is None else total % size
        return (rest, size) if size is not None and rest and size < total else None

    def updates_on_policy(self, prompts: int) -> bool:
        """Whether the only update of a batch of so many prompts gives its old log-probs: it is the first forward."""
        sequences = prompts * self.samples_per_prompt
        is_only_update = self.ppo_epochs == 1 and (self.minibatch_size or sequences) >= sequences
        estimator = ESTIMATORS.get(self.advantage)
        reads_old_logprobs = self.kl_in == "reward" and self.kl_coefficient > 0 or self.distill == REWARD
        are_read = reads_old_logprobs or estimator is not None and bool(estimator.needs & {"logprobs", "squares"})
        loss = POLICY_LOSSES.get(self.policy_loss)
        selects = loss is not None and loss.select is not None
        return is_only_update and not are_read and not selects and not self.corrects_before_updates

    @property
    def only_distills(self) -> bool:
        """Whether the divergence from the teacher is all of the loss."""
        in_loss = self.kl_in == "loss" and self.kl_coefficient
        other_terms = self.entropy_coefficient or self.positive_nll_coefficient or in_loss
        return self.distill == LOSS and self.advantage == NO_ADVANTAGE and not other_terms

    @property
    def environment_fields(self) -> tuple[str, ...]:
        """Batch fields that environments add to those of generation."""
        fields = "turn_rewards", "solved", "row_starts", *["forced"] * bool(self.thinking_budget)
        return fields if self.environment else ()

    @property
    def sampled_fields(self) -> tuple[str, ...]:
        """Batch fields that sampling adds to those of generation."""
        verdicts = ("scores", "correct", *self.part_fields) if self.scores_rounds else ()
        return self.environment_fields + verdicts + (("baseline_scores",) if self.greedy_baseline else ())

    @property
    def staleness_fields(self) -> tuple[str, ...]:
        """Batch fields that the actor gets if tokens may be of an older policy than the one that is trained."""
        return ("staleness",) if self.has_stale_tokens else ()

    @property
    def has_stale_tokens(self) -> bool:
        """Whether tokens may be of an older policy than the one that is trained on them."""
        return self.generation_lag > 0 or self.partial_rollouts

    @property
    def can_lose_responses(self) -> bool:
        """Whether there may be sequences without response tokens: failed episodes, or responses that have no score."""
        return self.environment is not None or self.reward_failure == "drop"

    @property
    def score_fields(self) -> tuple[str, ...]:
        """Batch fields of the reward role. The response mask loses the responses that have no score."""
        return ("scores", "correct", *self.part_fields, *(("response_mask",) if self.reward_failure == "drop" else ()))

    @property
    def part_weights(self) -> tuple[float, ...]:
        """Weights of the parts of the reward, if the estimator may read several: the terms that count, then the length
        penalty. () for a single part, which is the score."""
        estimator = ESTIMATORS.get(self.advantage)
        if estimator is not None and "parts" not in estimator.needs:
            return ()
        weights = [term.weight for term in expression.parse(self.reward) if term.weight]
        weights += [self.overlong_penalty] if self.overlong_buffer else []
        return tuple(weights) if len(weights) > 1 else ()

    @property
    def reads_squares(self) -> bool:
        """Whether the estimator reads Σπ_old² of each token."""
        estimator = ESTIMATORS.get(self.advantage)
        return estimator is not None and "squares" in estimator.needs

    @property
    def part_fields(self) -> tuple[str, ...]:
        """Batch fields that hold the parts of the reward."""
        return ("reward_parts",) if self.part_weights else ()

    @property
    def context_fields(self) -> tuple[str, ...]:
        """Batch fields that the reward role sends to a teacher that reads siblings, unless the batch has them."""
        return self.score_fields if self.teacher_context == SIBLING and not self.scores_rounds else ()

    @property
    def return_fields(self) -> tuple[str, ...]:
        """Batch fields that the critic gets from the actor: with the response mask if it may have changed."""
        return ("returns", *(("response_mask",) if self.can_lose_responses else ()))
