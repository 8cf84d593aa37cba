"""Scores of a micro-batch's response tokens under a language model."""

from collections.abc import Callable, Sequence

from megarl.batch import Batch
from megarl.mcore.model.forward_pass import TeacherRows, TokenScorer, run_chunk


def policy_scores(
    chunk, microbatch: Batch, temperature: float, vocab_size: int, teachers: Sequence[TeacherRows] = (),
    only_distills: bool = False, learner: Callable | None = None, squares: bool = False,
):  # fmt: skip
    """What `TokenScorer` returns for the response tokens, after what the micro-batch knows of its routes and shared
    prompts; `learner`: as of `run_chunk`."""
    host = microbatch.host_metadata
    scorer = TokenScorer(temperature, vocab_size, host.response_mask, teachers, only_distills, squares)
    return run_chunk(chunk, microbatch.tokens, host.lengths, scorer, microbatch.routing, host.shared, learner)
