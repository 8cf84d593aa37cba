"""Flags of rewards: the terms of the sum and their options, the judge, and the penalty on long responses."""

import dataclasses
import functools
from collections.abc import Iterator

from megarl import plugins
from megarl.algorithms.score_shaping import ENSEMBLES
from megarl.errors import UsageError
from megarl.flags.conditions import REWARD_MODEL, Broken, Condition, FlagContext, on
from megarl.flags.fields import GENERATING, address, flag, fraction, not_negative, one_of, parses, positive
from megarl.measurements import MAX_VALUE
from megarl.rewards import expression
from megarl.rewards.composition import parse_cosine

FORMAT = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"


@functools.cache
def of_reward(name: str) -> Condition:
    """The condition that `--reward` has a term of that name."""
    return Condition(lambda run: name in run.rewards, f"--reward {{reward}} has no {name} term")


JUDGED = of_reward(expression.JUDGE)
FALLIBLE = Condition(
    lambda run: bool(run.rewards - {*expression.INFALLIBLE}), "--reward {reward} has neither a verifier nor a judge"
)
CONCURRENT = Condition(
    lambda run: "remote" in run.rewards or any(map(plugins.is_plugin, run.rewards)),
    "--reward {reward} has neither a remote term nor a plug-in, which may be async",
)
LOCAL = Condition(
    lambda run: bool(run.rewards - {*expression.UNVERIFIED, "remote"}),
    "--reward {reward} has no verifier that runs locally",
)
ENSEMBLE = Condition(
    lambda run: expression.MODEL in run.rewards and "," in (run.settings.reward_model or ""),
    "needs several folders in --reward-model",
)
OVERLONG = on(lambda s: s.overlong_buffer > 0, "--overlong-buffer is 0")


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Rewards."""

    reward: str = flag("exact-match", programs=GENERATING, names=expression.NAMES)
    """weighted sum of reward terms, as 'model+0.2*format' (weight 0: logged, not added); terms: {names}, or
    file.py:function or package.module:function; default with --environment: environment, with --distill: none, without
    any term"""
    reward_model: str | None = flag(None, programs=GENERATING, when=REWARD_MODEL)
    """run folder of train_reward; several, separated by commas, form an ensemble"""
    reward_hf_model: str | None = flag(None, programs=GENERATING, when=REWARD_MODEL)
    """Hugging Face folder of a reward model (sequence classification with one label); with --reward-model it gives all
    but the weights"""
    reward_ensemble: str = one_of("mean", ENSEMBLES, programs=GENERATING, when=ENSEMBLE)
    """how an ensemble's scores are combined: mean or min (2310.02743)"""
    reward_max_length: int | None = positive(None, programs=GENERATING, when=REWARD_MODEL)
    """maximum tokens of a sequence that the reward model reads; longer sequences keep their end; default:
    --max-prompt-length + --max-response-length"""
    reward_normalize: bool = flag(False, when=REWARD_MODEL)
    """normalize the reward model's score by the running mean and standard deviation of all its scores"""
    reward_clip: float | None = positive(None, when=REWARD_MODEL)
    """clip the reward model's score to ± this value (1707.06347); default: no clipping"""
    reward_pattern: str | None = flag(None, programs=GENERATING, when=of_reward("regex"))
    """regex: pattern to search in the response; its first group, or the whole match, is compared with the answer"""
    reward_format: str = flag(FORMAT, programs=GENERATING, when=of_reward("format"))
    """format: pattern that the whole response must match"""
    reward_length: int = positive(256, programs=GENERATING, when=of_reward("length"))
    """length: tokens up to which a response gets the full reward"""
    reward_cosine: str = flag(
        "1,0.5,-1,-0.5,-1",
        parses(parse_cosine),
        "five numbers with commas",
        programs=GENERATING,
        when=of_reward("cosine"),
    )
    """cosine: rewards of a right answer at no length and at --max-response-length, of a wrong one at both, and of a
    truncated response (2502.03373)"""
    reward_ngram: int = positive(3, programs=GENERATING, when=of_reward("repetition"))
    """repetition: length of the n-grams, tokens"""
    reward_url: str | None = address(programs=GENERATING, when=of_reward("remote"))
    """remote: URL of the HTTP scoring service"""
    reward_retries: int = not_negative(3, programs=GENERATING, when=of_reward("remote"))
    """remote: retries of a failed request, with back-off"""
    reward_concurrency: int = positive(8, programs=GENERATING, when=CONCURRENT)
    """concurrent requests of remote, and calls of an async plug-in"""
    reward_memory_mb: int = positive(1024, programs=GENERATING, when=of_reward("code"))
    """code: memory limit of a checked program, MiB"""
    reward_timeout: float = positive(30.0, programs=GENERATING, when=FALLIBLE)
    """time limit of a verifier for one sample, seconds"""
    reward_workers: int = not_negative(0, programs=GENERATING, when=LOCAL)
    """worker processes per scoring rank for verifiers; 0: run them in the rank's process"""
    reward_failure: str = one_of("drop", ("drop", "fallback"), programs=GENERATING, when=FALLIBLE)
    """a response whose verifier or judge failed: drop (it counts in no group and no loss) or fallback (it gets
    --reward-fallback)"""
    reward_fallback: float = flag(
        0.0, lambda v: abs(v) <= MAX_VALUE, f"-{MAX_VALUE:g} to {MAX_VALUE:g}", programs=GENERATING, when=FALLIBLE
    )
    """score of a response whose verifier or judge failed; evaluation always uses it"""
    reward_max_failures: float = fraction(0.1, programs=GENERATING, when=FALLIBLE)
    """fraction of the latest samples that may fail in a verifier or the judge before the run stops; 0: none"""
    overlong_buffer: int = not_negative(0)
    """tokens before --max-response-length over which the length penalty grows (2503.14476 eq. 13); 0: no penalty"""
    overlong_penalty: float = positive(1.0, when=OVERLONG)
    """penalty of a response of --max-response-length tokens"""
    # The judge; its role is the reward's.
    judge_config: str | None = flag(None, programs=GENERATING, when=JUDGED)
    """YAML file: the messages that the judge reads, how it answers, and how a number is read from its answer"""
    judge_hf_model: str | None = flag(None, programs=GENERATING, when=JUDGED)
    """Hugging Face folder of the judge, a language model; with --judge-load it gives all but the weights"""
    judge_load: str | None = flag(None, programs=GENERATING, when=JUDGED)
    """run folder or checkpoint of train_sft or train_rl that is the judge; the flags with the prefix --reward- describe
    its model"""
    judge_max_length: int = positive(2048, programs=GENERATING, when=JUDGED)
    """tokens of the judge's prompt and judgement together"""
    judge_buffer_gb: float = positive(0.25, programs=GENERATING, when=JUDGED)
    """KV cache of each rank of the judge, GiB"""
    judge_max_requests: int = positive(64, programs=GENERATING, when=JUDGED)
    """maximum judgements that a replica of the judge writes together, at least 4"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of `--reward` and its options."""
    yield from _terms(run)
    yield from _counts(run)


def _terms(run: FlagContext) -> Iterator[Broken]:
    """What each term needs."""
    s, names = run.settings, run.rewards
    if "model" in names and not (s.reward_model or s.reward_hf_model):
        yield "--reward", "needs --reward-model, a run folder of train_reward, or --reward-hf-model"
    if {expression.MODEL, expression.JUDGE} <= names:
        why = "the reward role runs one model: a reward model (model) or a judge (judge); leave one of them out"
        yield "--reward", why
    if expression.JUDGE in names and s.judge_config is None:
        yield "--reward", "needs --judge-config, a file that says what the judge reads"
    if expression.JUDGE in names and not (s.judge_hf_model or s.judge_load):
        yield "--reward", "needs --judge-hf-model or --judge-load, the judge's weights"
    if expression.ENVIRONMENT in names and s.environment is None:
        yield "--reward", "needs --environment, whose rewards the term environment is"
    if "regex" in names and s.reward_pattern is None:
        yield "--reward", "needs --reward-pattern"
    if "remote" in names and s.reward_url is None:
        yield "--reward", "needs --reward-url"


def _counts(run: FlagContext) -> Iterator[Broken]:
    """What the sum of the terms must give."""
    s, names, terms = run.settings, run.rewards, run.terms
    counts, has_teacher = any(term.weight for term in terms), s.distill != "none"
    held_out = "--evals" if s.eval_prompts is None else "--eval-prompts"
    if not terms and not has_teacher:
        yield "--reward", "needs --distill: nothing else would be learnt"
    if terms and not counts and not (has_teacher and run.program == "rl"):
        yield "--reward", "every weight is 0; at least one term must count"
    if expression.ADAPTIVE in names and s.samples_per_prompt == 1:
        why = f"{expression.ADAPTIVE} in --reward needs 2 or more: it reads the mean reward of a prompt's responses"
        yield "--samples-per-prompt", why
    if s.greedy_baseline and (s.reward_normalize or s.reward_clip):
        yield "--greedy-baseline", "uses raw scores; not allowed with --reward-normalize or --reward-clip"
    if s.overlong_buffer > s.max_response_length:
        yield "--overlong-buffer", f"allowed is at most --max-response-length {s.max_response_length}"
    if s.evaluates and not terms:
        yield (
            held_out,
            f"needs a --reward that measures the responses; one of weight 0, as 0*{expression.EXACT_MATCH}, is "
            "not learnt",
        )


def check_judge(args):
    """UsageError for a layout of the reward role in which no judge can generate. `args`: its Megatron namespace."""
    if args.context_parallel_size > 1:
        raise UsageError(
            f"--context-parallel-size {args.context_parallel_size}: the judge generates without it; give "
            "--reward-context-parallel-size 1"
        )
    if args.virtual_pipeline_model_parallel_size is not None:
        raise UsageError("--reward judge: not allowed with virtual pipeline stages of the reward role; leave them out")
    if args.use_torch_fsdp2:
        raise UsageError("--reward judge: not allowed with --use-torch-fsdp2, whose sharded weights cannot generate")
