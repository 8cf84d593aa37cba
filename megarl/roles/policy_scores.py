"""Scores of a micro-batch's response tokens under a language model."""

from collections.abc import Callable, Sequence

from megarl.batch import Batch
from megarl.mcore.model.forward_pass import TeacherRows, token_scores


def policy_scores(
    chunk, microbatch: Batch, temperature: float, vocab_size: int, teachers: Sequence[TeacherRows] = (),
    only_distills: bool = False, learner: Callable | None = None, squares: bool = False,
):  # fmt: skip
    """`token_scores` of the response tokens; what the micro-batch knows of its routes and shared prompts counts."""
    host = microbatch.host_metadata
    return token_scores(
        chunk, microbatch.tokens, host.lengths, temperature, vocab_size, microbatch.routing, host.response_mask,
        host.shared, teachers, only_distills, learner, squares,
    )  # fmt: skip
