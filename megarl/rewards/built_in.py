"""What a row of the table of verifiers (`rewards.VERIFIERS`) says of one, and the flags that verifiers read."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.rewards.base import Sample, Score

if TYPE_CHECKING:  # the rows are in modules that read prompts
    from megarl.data.prompts import PromptSet


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags `--reward-FIELD` that verifiers read. Plain values, because it is pickled to the workers."""

    pattern: str | None
    format: str
    length: int
    url: str | None
    retries: int
    concurrency: int  # requests, or calls of an async function, at a time
    memory_mb: int
    timeout: float  # seconds per sample
    workers: int

    @classmethod
    def of(cls, settings) -> "Options":
        """From `megarl.flags.settings.Settings`, whose import would be too slow for a worker."""
        return cls(
            pattern=settings.reward_pattern, format=settings.reward_format, length=settings.reward_length,
            url=settings.reward_url, retries=settings.reward_retries, concurrency=settings.reward_concurrency,
            memory_mb=settings.reward_memory_mb, timeout=settings.reward_timeout, workers=settings.reward_workers,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BuiltIn:
    """`make` builds the function; `check` checks the prompts; `load` checks them with what the verifier imports.

    `limited`: it can hang, so it needs a time limit. `threads`: it enforces the limit itself and may run on as many
    threads as this option says. `wrong`: its score of a response with which it takes too long. `isolated`: a process of
    its own scores each response and says whether that took too long.
    """

    make: Callable[[Options], Callable[[Sample], Score | float]]
    check: Callable[["PromptSet"], None] | None = None
    load: Callable[["PromptSet", Options], None] | None = None
    limited: bool = True
    threads: str | None = None
    wrong: Score | None = None
    isolated: bool = False
