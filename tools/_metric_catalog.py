"""The metrics of a run: name, unit, meaning, and when each is in metrics.jsonl.

A name may have placeholders in angle brackets: `time/<role>/<phase>_s` stands for `time/actor/update_s` and others.
Some metrics depend on the clock or the machine, so that two equal runs may have different values (`is_reproducible`).
"""

import functools
import re
from collections.abc import Iterable

from tools._metric import Metric
from tools._supervised_metrics import PAIR_METRICS, PREFERENCE, SUPERVISED

TRAINING = ("train_rl", "train_sft", "train_reward", "train_preference")
LOSSES = ("train_sft", "train_reward", "train_preference")
MTP = "with --mtp-drafts"
JOINED = "with --replica-port"
PARTIAL = "with --partial-rollouts"
DRAFTS = "with --speculative-rollout or --mtp-drafts"
SEVERAL, STUDENTS = "with several --teachers, in steps with such tokens", ("train_rl", "train_sft")
SIBLING = "with --teacher-context sibling"
EVALUATED = ("train_rl", "evaluate")
FP16 = "with --fp16"
PICTURED = "if prompts have images, or environments may show some"
PICTURING = ("train_rl", "train_sft", "train_reward", "train_preference")
STALE = "with --generation-lag or --partial-rollouts"
IN_TRAINING = "in training with --eval-prompts, every --eval-interval steps"

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Reward": (
        Metric("reward/mean", "reward", "mean score of the step's responses, length penalty included; episodes whose"
               " environment failed are in no mean"),
        Metric("reward/std", "reward", "standard deviation of the scores"),
        Metric("reward/accuracy", "fraction", "responses that are correct by the environment, the first verifier of"
               " answers, or the reward model"),
        Metric("reward/<term>/mean", "score", "mean score of one term of --reward, before its weight"),
        Metric("reward/<term>/std", "score", "standard deviation of the term's scores"),
        Metric("reward/<term>/failures", "samples", "samples of the step whose verifier failed, or whose judgements had"
               " no number: they were dropped, or got --reward-fallback", "for verifiers and a judge"),
        Metric("reward/<term>/timeouts", "samples", "responses that took a verifier longer than --reward-timeout and"
               " count as wrong", "for verifiers whose time limit is a verdict"),
        Metric("reward/model/cut_fraction", "fraction", "texts that were longer than --reward-max-length and lost the"
               " start of their prompt", "with a reward model"),
        Metric("judge/readable_fraction", "fraction", "judgements and retries with a valid number", "with a judge"),
        Metric("judge/length_mean", "tokens", "mean length of a judgement", "with a judge"),
        Metric("judge/tokens", "tokens", "tokens that the judge wrote", "with a judge"),
        Metric("judge/prompt_tokens", "tokens", "tokens of its prompts that the judge read", "with a judge"),
        Metric("judge/order_agreement", "fraction", "pairs with equal winners in both orders", "with a judge of pairs"),
        Metric("judge/reused_tokens", "tokens", "tokens of its prompts that the KV cache had already", "with a judge"),
        Metric("reward/model/disagreement", "score", "mean deviation between the models of an ensemble",
               "with a reward model; 0 without an ensemble"),
    ),
    "Rollout": (
        Metric("rollout/tokens", "tokens", "tokens generated during the step and kept, also if a"
               " later step trains on them"),
        Metric("rollout/tokens_per_s", "tokens/s", "these over the seconds of the phase rollout"),
        Metric("rollout/response_length_mean", "tokens", "mean length of the responses"),
        Metric("rollout/finished_fraction", "fraction", "responses that ended before --max-response-length; with an"
               " environment, episodes that it ended"),
        Metric("rollout/thinking_cut_fraction", "fraction", "generated responses, or episodes, with thoughts that their"
               " budget has ended", "with --thinking-budget"),
        Metric("rollout/masked_fraction", "fraction", "response tokens that are excluded from the losses, since"
               " their response was truncated", "with --mask-truncated-responses"),
        Metric("rollout/entropy", "nats", "mean entropy of the policy over the response tokens, before the updates"),
        Metric("rollout/logprob_gap_max", "nats", "largest |rollout − recomputed log-prob| of a response token before"
               " any update; exactly 0 on a CPU, unless older policies generated the token (rollout/staleness)"),
        Metric("rollout/logprob_gap_mean", "nats", "mean of the same"),
        Metric("rollout/logprob_gap_max_fresh", "nats", "rollout/logprob_gap_max of the tokens with staleness 0;"
               " exactly 0 on a CPU", f"{STALE}, in steps with such tokens"),
        Metric("rollout/staleness", "updates", "actor updates since a trained token was generated, mean over tokens",
               STALE),
        Metric("rollout/staleness_share_<k>", "fraction", "trained tokens with staleness k, for k from 0 to"
               " --generation-lag, or to the oldest token of the step; they add up to 1", STALE),
        Metric("rollout/mixed_version_fraction", "fraction", "responses with tokens of several policy versions", STALE),
        Metric("rollout/lead", "batches", "batches after the step's that were generated when the actor began the step",
               "with --generation-lag"),
        Metric("rollout/staleness_max", "updates", "that of the oldest token", STALE),
        Metric("rollout/carried_fraction", "fraction", "trained tokens that are older than the step", PARTIAL),
        Metric("rollout/carried_groups", "groups", "unfinished groups that the next step continues", PARTIAL),
        Metric("rollout/dropped_groups", "groups", "groups that were older than --max-staleness, or whose"
               " environment cannot be replayed", PARTIAL),
        Metric("rollout/decode_steps", "steps", "decode steps of the replica with the most", DRAFTS),
        Metric("rollout/accepted_tokens_per_step", "tokens", "a request's in a decode step; 1 without drafts", DRAFTS),
        Metric("rollout/draft_acceptance", "fraction", "drafted tokens that were accepted", DRAFTS),
        Metric("rollout/mtp_acceptance", "fraction", "right ones of the tokens that the layer guessed", MTP),
        Metric("rollout/prefill_tokens", "tokens", "prompt tokens that the engine read, of equal prompts each; those of"
               " an evicted request, with its response so far, again", "with --rollout-prefix-caching"),
        Metric("rollout/reused_tokens", "tokens", "prompt tokens that were already in the cache",
               "with --rollout-prefix-caching"),
        Metric("rollout/replicas", "replicas", "those that were there after the step's rounds", JOINED),
        Metric("rollout/joined", "replicas", "those that joined since the last step", JOINED),
        Metric("rollout/reissued", "requests", "requests that went from a replica to others", JOINED),
        Metric("rollout/lost_tokens", "tokens", "tokens of these that were generated in vain, at most", JOINED),
        Metric("rollout/duplicates_differ", "requests", "requests that two replicas answered differently: 0, unless the"
               " kernels are not deterministic", JOINED),
    ),
    "Images": (
        Metric("images/count", "images", "distinct images whose rows were read, of each replica: by the engine, or"
               " without one by the model", PICTURED, PICTURING),
        Metric("images/tokens", "tokens", "rows of these images", PICTURED, PICTURING),
        Metric("images/cache_hits", "images", "those of them that were computed before", PICTURED, PICTURING),
        Metric("time/tower_s", "s", "seconds of vision towers, on the slowest rank of each replica, added",
               PICTURED, PICTURING),
    ),
    "Mixtures": (
        Metric("mixture/<file>/prompts", "prompts", "prompts of a file of the mixture that the run has drawn so far",
               "with a mixture in --prompts"),
    ),
    "Environments": tuple(
        metric._replace(when="with --environment") for metric in (
            Metric("environment/turns_mean", "turns", "turns of the episodes that ended in the step"),
            Metric("environment/tool_calls", "calls", "tool calls that could be read"),
            Metric("environment/malformed_calls", "calls", "texts that look like a tool call but are not valid"),
            Metric("environment/truncated_fraction", "fraction", "episodes that ended because a turn was truncated, the"
                   " turns were used up, or --max-response-length left no room"),
            Metric("environment/failures", "episodes", "episodes whose environment failed, which are not trained on"),
            Metric("environment/failed_fraction", "fraction", "the same over all episodes of the step"),
            Metric("environment/restarts", "restarts", "environments made again after a crash or a late answer"),
            Metric("environment/timeouts", "calls", "answers that took longer than --environment-timeout"),
            Metric("environment/journalled_steps", "steps", "answers taken from the journal of a run that was killed"),
            Metric("environment/step_s", "s", "mean time that an environment took for an answer"),
            Metric("environment/waiting_share", "fraction", "share of the rollout's time in which a replica only"
                   " waited for environments, mean over replicas"),
            Metric("environment/shared_turns", "turns", "turns that an episode took from another sample of its branch,"
                   " with --branch-turns"),
            Metric("environment/reward/<component>", "reward", "mean of a named component's sum over an episode"),
            Metric("agent/rows_per_episode", "rows", "rows of tokens of an agent's episode"),
            Metric("agent/rewritten_history", "requests", "requests of agents whose history the template or the agent"
                   " has changed, so that they begin a row"),
        )
    ),
    "Difficulty pools": tuple(
        Metric(f"pools/{name}_fraction", "fraction", f"prompts of --prompts {text}", "with --pool-bounds")
        for name, text in (
            ("hard", "in the pool of hard ones"), ("normal", "that are neither hard nor easy, unseen ones included"),
            ("easy", "in the pool of easy ones"), ("retired", "that --pool-retire-after has left out for good"),
            ("unseen", "that had no group so far"),
        )
    ),
    "Group sampling": tuple(
        metric._replace(when="with --group-filter reward or correct") for metric in (
            Metric("sampling/rounds", "rounds", "sampling rounds of the step"),
            Metric("sampling/groups", "groups", "groups generated in the step"),
            Metric("sampling/kept_fraction", "fraction", "groups that passed the filter"),
            Metric("sampling/reward_mean", "reward", "mean score before the filter"),
            Metric("sampling/waiting_groups", "groups", "kept groups that wait for their batch to be full"),
        )
    ),
    "Actor": (
        Metric("actor/loss", "loss", "policy loss with KL and entropy terms, mean over the updates' tokens, or over"
               " their sequences with --loss-aggregation seq-mean-*"),
        Metric("actor/entropy", "nats", "entropy over the whole vocabulary, mean over the updates' response tokens"),
        Metric("actor/ppo_kl", "nats", "KL from the policy before the step, mean over the updates' response tokens"),
        Metric("actor/ppo_kl_first", "nats", "the same for the first mini-batch, before any update; exactly 0"),
        Metric("actor/clip_fraction", "fraction", "response tokens whose ratio was clipped"),
        Metric("actor/kl_loss", "nats", "KL term of the loss, before its coefficient", "with --kl-in loss"),
        Metric("actor/selected_fraction", "fraction", "response tokens that the policy loss masks (m2po, clip-cov) or"
               " holds back (kl-cov)", "with --policy-loss m2po, clip-cov or kl-cov"),
        Metric("actor/opsm_fraction", "fraction", "response tokens whose policy loss was dropped", "with"
               " --opsm-threshold"),
        Metric("actor/positive_nll", "nats", "−log π of the tokens of correct responses, mean over the updates' such"
               " tokens", "with --positive-nll-coefficient"),
        Metric("actor/grad_norm", "norm", "gradient norm before clipping, mean over the updates that had a loss"),
        Metric("actor/mtp_loss", "nats", "cross-entropy of the layer of multi-token prediction, mean over the tokens of"
               " responses that it predicts", "with --mtp-train", STUDENTS),
        Metric("actor/mtp_grad_norm", "norm", "gradient norm of it before clipping", "with --mtp-train", STUDENTS),
        Metric("actor/learning_rate", "rate", "learning rate of the next update"),
        Metric("actor/updates", "updates", "updates of the step that changed the weights; 0 if no group passed the"
               " filter or nothing was left to train on; none during --critic-warmup-steps", "",
               ("train_rl", "train_sft", "train_preference")),
        Metric("actor/updates_skipped", "updates", "updates skipped, because a loss or gradient was not finite or an"
               " alarm said skip", "", ("train_rl", "train_sft", "train_preference")),
    ),
    "Critic": tuple(
        metric._replace(when="with a critic (--advantage gae)") for metric in (
            Metric("critic/loss", "loss", "clipped value loss, mean over the updates' response tokens"),
            Metric("critic/clip_fraction", "fraction", "response tokens whose value was clipped"),
            Metric("critic/explained_variance", "fraction", "share of the returns' variance that the values explain; 1:"
                   " perfect, below 0: worse than a constant"),
            Metric("critic/grad_norm", "norm", "gradient norm before clipping, mean over the updates that had a loss"),
            Metric("critic/learning_rate", "rate", "learning rate of the next update"),
            Metric("critic/updates", "updates", "updates of the step that changed the weights"),
            Metric("critic/updates_skipped", "updates", "updates skipped, as of the actor"),
        )
    ),
    "KL to the reference": (
        Metric("kl/reference", "nats", "sum of log π − log π_ref (k1) over a response, mean over responses, whichever"
               " estimator is optimised", "with a reference"),
        Metric("reference/step", "step", "the step after which the reference got its weights; 0: the initial ones",
               "with --reference-update-interval"),
        Metric("kl/coefficient", "–", "the coefficient β of the step", "with a reference"),
    ),
    "Distillation": (
        *(
            metric._replace(when="with --distill loss", programs=STUDENTS) for metric in (
                Metric("distill/divergence", "nats", "divergence from the teacher, as of --distill-divergence, over the"
                       " whole vocabulary, before its coefficient, mean over the updates' response tokens"),
                Metric("distill/forward_kl", "nats", "KL(teacher ‖ policy), whichever divergence is the loss"),
                Metric("distill/top1_agreement", "fraction", "tokens at which both have the same most likely token"),
            )
        ),
        Metric("distill/reverse_kl", "nats", "KL(policy ‖ teacher); with --distill reward the mean of log π_old −"
               " log π_T over the step's response tokens", "with --distill", STUDENTS),
        Metric("teacher/logprob", "nats", "mean log-prob of the response tokens under the teacher, at its own"
               " temperature", "with --distill", STUDENTS),
        Metric("teacher/context_fraction", "fraction", "responses before which the teacher reads a correct sibling",
               SIBLING),
        Metric("teacher/context_too_long_fraction", "fraction", "responses that lack it for its length", SIBLING),
        Metric("weights/teacher_bytes", "bytes", "bytes that all ranks send to the teacher", "with --teacher ema"),
        Metric("sft/negative_logprob", "nats", "mean negative log-prob of the response tokens, whatever the loss is",
               "with --distill loss", ("train_sft",)),
        Metric("eval/divergence", "nats", "the same divergence of held-out responses", "with --distill loss",
               ("train_sft",)),
        *(Metric(f"{name}/<teacher>", unit, "the same over the tokens of one teacher", SEVERAL, programs)
          for name, unit, programs in (
              ("distill/divergence", "nats", STUDENTS), ("distill/forward_kl", "nats", STUDENTS),
              ("distill/top1_agreement", "fraction", STUDENTS), ("distill/reverse_kl", "nats", STUDENTS),
              ("teacher/logprob", "nats", STUDENTS), ("eval/divergence", "nats", ("train_sft",)))),
    ),
    "Rollout correction": (
        Metric("correction/weight_mean", "ratio", "mean of the unbounded weights π_old/μ, per token or response as"
               " --rollout-correction-level says; its expectation is 1"),
        Metric("correction/weight_max", "ratio", "the largest of them"),
        Metric("correction/effective_sample_size", "fraction", "(Σw)²/(n·Σw²) of the weights"),
        Metric("correction/applied_mean", "ratio", "mean of the weights that multiplied the loss"),
        Metric("correction/truncated_fraction", "fraction", "weights at the cap"),
        Metric("correction/masked_fraction", "fraction", "weights set to 0"),
        *(metric._replace(when="with --rollout-rejection") for metric in (
            Metric("rejection/fraction", "fraction", "response tokens that were left out of the actor's loss"),
            Metric("rejection/<bound>", "fraction", "those that break this bound"),
            Metric("rejection/responses", "responses", "responses that lost all of their tokens"),
            Metric("rejection/correct_responses", "responses", "those of them that are correct"))),
        Metric("correction/kl", "nats", "KL(μ ‖ π_old) by k1, mean over tokens"),
        Metric("correction/kl_k3", "nats", "the same by k3"),
        Metric("correction/kl_k3_age_<k>", "nats", "the same of the tokens with staleness k",
               f"{STALE}, in steps with such tokens"),
    ),
    "Mixture of experts": (
        *(
            metric._replace(when=f"{metric.when}; the critic's are critic/router/…", programs=TRAINING) for metric in (
                Metric("router/load_imbalance", "ratio", "tokens of the busiest expert over the mean, minus 1, mean"
                       " over layers", "with experts"),
                Metric("router/load_imbalance/layer_<layer>", "ratio", "the same of one layer", "with experts"),
                Metric("router/idle_experts", "fraction", "experts without a token in the step", "with experts"),
                Metric("router/aux_loss", "loss", "load-balancing loss before its coefficient, summed over layers",
                       "with --moe-aux-loss-coeff"),
                Metric("router/z_loss", "loss", "z-loss before its coefficient, summed over layers",
                       "with --moe-z-loss-coeff"),
            )
        ),
        Metric("router/replayed_fraction", "fraction", "(token, layer) pairs of the updates whose route was replayed;"
               " a value other than 1 is a bug", "with --router-replay"),
        Metric("router/disagreement", "fraction", "replayed (token, layer) pairs for which the live router would have"
               " chosen other experts", "with --router-replay"),
        Metric("router/disagreement/layer_<layer>", "fraction", "the same of one layer", "with --router-replay"),
        Metric("router/gap_live", "nats", "mean |rollout − recomputed log-prob| of probed responses, routed anew",
               "with --router-probe-interval"),
        Metric("router/gap_replayed", "nats", "the same with the rollout's routes", "with --router-probe-interval"),
        *(
            Metric(f"critic/router/{name}", unit, f"as router/{name}, of the critic", "with experts in the critic")
            for name, unit in (("load_imbalance", "ratio"), ("load_imbalance/layer_<layer>", "ratio"),
                               ("idle_experts", "fraction"), ("aux_loss", "loss"), ("z_loss", "loss"))
        ),
    ),
    "Chosen keys": (
        *(
            metric._replace(when="with --dsa-indexer-topk, if sequences are longer", programs=programs)
            for prefix, owner, programs in (("", "", TRAINING), ("critic/", ", of the critic", ("train_rl",)))
            for metric in (
                Metric(f"{prefix}indexer/disagreement", "fraction", "how much of the attention to the best as many keys"
                       f" a frozen indexer's choice misses{owner}: mean over layers and a sample of the updates'"
                       " queries"),
                Metric(f"{prefix}indexer/disagreement/layer_<layer>", "fraction", f"the same of one layer{owner}"),
            )
        ),
    ),
    "fp16": (
        Metric("<role>/loss_scale", "factor", "loss scale of the next update; <role>: actor, critic, sft, reward or"
               " preference", FP16, TRAINING),
        Metric("<role>/overflows", "updates", "updates without effect, because gradients overflowed; they lowered the"
               " scale and do not count as skipped", FP16, TRAINING),
    ),
    **SUPERVISED,
    "Evaluation": (
        Metric("eval/accuracy", "fraction", "held-out responses that are correct; without --eval-prompts the mean of"
               " those of --evals", IN_TRAINING, EVALUATED),
        Metric("eval/pass@<k>", "fraction", "prompts with a correct one among k responses (2107.03374)",
               "with --eval-responses or --eval-k", EVALUATED),
        Metric("eval/mean@<k>", "fraction", "mean accuracy of k responses", "with --eval-responses or --eval-k",
               EVALUATED),
        Metric("eval/maj@<k>", "fraction", "prompts whose most frequent answer of k is correct (2203.11171)",
               "with --eval-responses or --eval-k, if the verifier extracts answers", EVALUATED),
        Metric("eval/reward", "reward", "mean score of the held-out responses", IN_TRAINING, EVALUATED),
        Metric("eval/reward/<term>", "score", "mean score of one term", "with several terms in --reward", EVALUATED),
        Metric("eval/response_length_mean", "tokens", "mean length of the held-out responses", IN_TRAINING, EVALUATED),
        Metric("eval/finished_fraction", "fraction", "held-out responses that ended before --max-response-length",
               IN_TRAINING, EVALUATED),
        *(
            Metric(f"eval/<task>/{name}", unit, f"eval/{name} of one task, or of a set of --evals, whose tasks are"
                   " <name>/<task>", "with prompts of several tasks, or --evals", EVALUATED)
            for name, unit in (
                ("accuracy", "fraction"), ("pass@<k>", "fraction"), ("mean@<k>", "fraction"), ("maj@<k>", "fraction"),
                ("reward", "reward"), ("reward/<term>", "score"), ("response_length_mean", "tokens"),
                ("finished_fraction", "fraction"),
            )
        ),
        Metric("eval/loss", "nats", "loss on the held-out lines", "with --eval-prompts, every --eval-interval steps",
               LOSSES),
        Metric("eval/accuracy", "fraction", "held-out pairs whose chosen text scores above the rejected one",
               "as eval/loss", ("train_reward",)),
        Metric("eval/margin", "score", "mean r_chosen − r_rejected of held-out pairs", "as eval/loss",
               ("train_reward",)),
        Metric("eval/mean", "score", "mean score of held-out texts", "as eval/loss", ("train_reward",)),
        *(
            Metric(f"eval/{name}", unit, f"preference/{name} of held-out pairs", "as eval/loss", PREFERENCE)
            for name, unit, _ in (*PAIR_METRICS[1:], ("kl", "nats", ""))
        ),
    ),
    "Weights": (
        Metric("weights/sync_bytes", "bytes", "bytes sent to the rollout's own model by all ranks; 0 where it shares"
               " the actor's"),
        Metric("weights/sync_s", "s", "seconds of that transfer"),
        Metric("weights/reference_bytes", "bytes", "bytes sent to the reference by all ranks, when it gets the actor's"
               " weights", "in the steps that --reference-update-interval divides"),
        Metric("weights/staged_bytes", "bytes", "copies of the weights that the actor's ranks hold, this step's and"
               " earlier ones on their way", "with --generation-lag"),
        Metric("weights/slot_wait_s", "s", "seconds that the actor waited until it held fewer copies than"
               " --generation-lag", "with --generation-lag"),
    ),
    "Times": (
        Metric("time/step_s", "s", "the step, the longest of all ranks", "", TRAINING),
        Metric("time/<role>/<phase>_s", "s", "a phase, the longest of the role's ranks; those of evaluations are"
               " eval_<phase>", "if the role has the phase", TRAINING),
        Metric("time/reward/<term>/calls_s", "s", "calls of a term's verifier, of all replicas, workers and threads"
               " together", "if the term has a verifier"),
        Metric("time/<role>/idle_fraction", "fraction", "share of the step in which the role's ranks wait for others",
               "", TRAINING),
        Metric("time/idle_fraction", "fraction", "the same over all ranks", "", TRAINING),
    ),
    "Memory": (
        Metric("memory/<role>/peak_bytes", "bytes", "peak device memory of the role's ranks", "on CUDA", TRAINING),
        Metric("memory/<role>/offloaded_bytes", "bytes", "size of the role's host copies, and of states on the host",
               "with --offload or --optimizer-cpu-offload"),
        Metric("memory/<role>/average_bytes", "bytes", "size of the moving average, in host memory", "with --ema-decay",
               TRAINING),
    ),
    "Throughput": (
        Metric("perf/tokens", "tokens", "tokens trained on, prompts included", "", TRAINING),
        Metric("perf/tokens_per_s", "tokens/s", "these over the seconds of the whole step", "", TRAINING),
    ),
    "Run": (
        Metric("step", "–", "number of the step; 0 is the evaluation before the first", "", TRAINING),
        Metric("steps_skipped", "steps", "steps of the run so far with a skipped update", "", TRAINING),
    ),
}  # fmt: skip
METRICS = tuple(metric for metrics in SECTIONS.values() for metric in metrics)

OF_MACHINE = ("time/", "memory/")  # prefixes of names
OF_CLOCK = ("_per_s", "/sync_s", "/slot_wait_s", "environment/step_s", "/waiting_share")  # endings of names
OF_QUEUES = ("rollout/lead", "weights/staged_bytes")  # how full they are: by the clock, and empty after a resume
OF_ORDER = (  # what a cache has lost or not: the order of requests decides
    "rollout/prefill_tokens", "rollout/reused_tokens", "judge/prompt_tokens", "judge/reused_tokens",
    "images/cache_hits",
)  # fmt: skip
# What happened to processes, and is mended: it changes nothing else.
OF_ACCIDENTS = (
    "environment/restarts", "environment/timeouts", "environment/journalled_steps", "rollout/replicas",
    "rollout/joined", "rollout/reissued", "rollout/lost_tokens", "rollout/duplicates_differ",
)  # fmt: skip


@functools.cache
def _compiled() -> tuple[tuple[re.Pattern, Metric], ...]:
    return tuple((re.compile(metric.pattern), metric) for metric in METRICS)


def find(name: str) -> tuple[Metric, ...]:
    """The entries that a name of metrics.jsonl fits, the most specific first: one for each program at most."""
    fitting = [metric for pattern, metric in _compiled() if pattern.fullmatch(name)]
    return tuple(sorted(fitting, key=lambda metric: metric.name.count("<")))


def unknown(names: Iterable[str]) -> list[str]:
    """The names that no entry describes."""
    return [name for name in names if not find(name)]


def is_reproducible(name: str) -> bool:
    """Whether a metric has the same bits in each repetition of a run: all but those of time, memory and accidents."""
    is_clock = name.startswith(OF_MACHINE) or name.endswith(OF_CLOCK)
    return not is_clock and name not in OF_ORDER + OF_QUEUES + OF_ACCIDENTS


def reproducible(row: dict) -> dict:
    """A step's metrics without those of time and memory."""
    return {name: value for name, value in row.items() if is_reproducible(name)}
