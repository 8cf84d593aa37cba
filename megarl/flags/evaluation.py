"""Flags of the evaluation on held-out prompts, and of the best checkpoint."""

import dataclasses
import functools
from collections.abc import Iterator

from megarl.flags.conditions import EVALUATES, EVALUATION, Broken, FlagContext, on
from megarl.flags.fields import DATA, GENERATING, SUPERVISED, TRAINING, flag, not_negative, parse_ints, parses, positive
from megarl.plain_files import parse_named_paths

BEST = on(lambda s: s.evaluates and s.eval_interval and s.save, "needs --eval-prompts, --eval-interval and --save")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluation."""

    eval_interval: int = not_negative(0, programs=TRAINING, when=EVALUATES)
    """steps between evaluations; 0: none"""
    eval_samples: int = positive(256, programs=DATA, when=EVALUATION)
    """number of held-out prompts to evaluate"""
    eval_responses: int = positive(1, programs=GENERATING, when=EVALUATION)
    """responses per held-out prompt"""
    eval_temperature: float = not_negative(0.0, programs=GENERATING, when=EVALUATION)
    """sampling temperature of the evaluation; 0: greedy"""
    eval_k: str | None = flag(
        None,
        parses(functools.partial(parse_ints, least=1)),
        "whole numbers above 0 with commas",
        programs=GENERATING,
        when=EVALUATION,
    )
    """k of pass@k, mean@k and maj@k, as '1,4,8' (2107.03374); default: 1 and --eval-responses, if that is above 1"""
    keep_best: bool = flag(True, programs=TRAINING, when=BEST)
    """also save a checkpoint after the best evaluation: the highest eval/accuracy, in train_sft the lowest eval/loss"""
    best_metric: str | None = flag(None, when=BEST)
    """metric of --keep-best without eval/, of which the highest is the best, as NAME/accuracy; default: accuracy"""
    target_eval_loss: float | None = positive(None, programs=SUPERVISED)
    """stop the run when the evaluation loss is at most this; default: never"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of several responses to a held-out prompt, of names of metrics, and of limits that end a run."""
    s, most = run.settings, max(parse_ints(run.settings.eval_k)) if run.settings.eval_k else 1
    if s.evals is not None and "reward" in parse_named_paths(s.evals):
        yield "--evals", "metrics eval/reward/… are those of the terms; give another name", "reward"
    if s.target_eval_loss and not s.eval_interval:
        yield "--target-eval-loss", "needs --eval-interval"
    if s.target_eval_accuracy is not None and not s.eval_interval:
        yield "--target-eval-accuracy", "needs --eval-interval"
    if s.eval_responses > 1 and s.eval_temperature == 0:
        yield "--eval-responses", "needs --eval-temperature above 0: greedy responses are all equal"
    if most > s.eval_responses:
        yield "--eval-k", f"allowed is at most --eval-responses {s.eval_responses}"
