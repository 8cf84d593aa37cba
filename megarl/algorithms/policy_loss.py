"""What every policy loss takes and gives, and what several share: options and their flags, the clip, means.

A loss is a file of `policy_losses/`. Only response tokens count in the statistics of a response; observation tokens
between the turns of it do not. Means over a response are taken in float64: a response of many thousand tokens then
loses no digits of its ratio, and the ratio does not depend on what else is in the micro-batch.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.packed import require_same_shape, response_counts, spread, sums_by_sequence


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """A packed batch of N whole sequences, T tokens, as a policy loss sees it. ValueError when shapes differ."""

    logprobs: Tensor  # [T] log π_θ of the policy being trained; the only field that a gradient flows to
    old_logprobs: Tensor  # [T] log π_old of the policy at the start of the step
    advantages: Tensor  # [T]
    response_mask: Tensor  # [T] bool, True where the policy wrote the token
    cu_seqlens: Tensor  # [N+1]

    def __post_init__(self):
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            response_mask=self.response_mask,
        )


class PolicyTerms(NamedTuple):
    """Per-token terms of a policy loss. Entries outside the response mask mean nothing: the aggregation skips them."""

    loss: Tensor  # [T], differentiable in the log-probabilities; a sequence's loss stands on each of its tokens
    clipped: Tensor  # [T] bool, a bound took the place of the ratio; but for cispo the token gives no gradient then
    approx_kl: Tensor  # [T] old − new log-probability (k1), no gradient; exactly 0 where both are the same number


class PolicyLoss(NamedTuple):
    """A policy loss, the name that `--policy-loss` gives it, and its options."""

    name: str
    function: Callable[[PolicyTokens, object], PolicyTerms]
    options: object  # an instance of a frozen dataclass; `function` takes it

    def flags(self) -> dict[str, dataclasses.Field]:
        """The flags that set its options, without dashes in front, and the fields that they set.

        A field's flag is `<loss>-<field>`, unless it names one of its own (`option`).
        """
        fields = dataclasses.fields(self.options)
        return {f.metadata.get("flag") or f"{self.name}-{f.name}".replace("_", "-"): f for f in fields}

    def with_options(self, values: dict[str, object]) -> "PolicyLoss":
        """The loss with options from flags, without dashes in front; ValueError for what its options refuse."""
        return self._replace(options=type(self.options)(**{f.name: values[flag] for flag, f in self.flags().items()
                                                           if flag in values}))  # fmt: skip

    def values(self) -> dict[str, object]:
        """Value of each flag's option."""
        return {flag: getattr(self.options, field.name) for flag, field in self.flags().items()}


def option(default, text: str, check: Callable | None = None, allowed: str = "", flag: str | None = None):
    """A field of a loss's options, with what the parser makes a flag of.

    Args:
        text: the flag's line of help; numbers in it are arXiv papers.
        check: whether a value is allowed.
        allowed: that, in words.
        flag: its name without dashes in front, for options that several losses share; else `<loss>-<field>`.
    """
    return dataclasses.field(default=default, metadata={"help": text, "check": check, "allowed": allowed, "flag": flag})


def positive(default: float | None, text: str, flag: str | None = None):
    """An `option` that is a number above 0."""
    return option(default, text, lambda value: value > 0, "a number above 0", flag)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """For a loss that has none."""


@dataclasses.dataclass(frozen=True)
class ClipRange:
    """How far a loss lets the ratio go; each loss says how. ValueError for a bound out of range."""

    low: float = positive(0.2, "lower clip range ε (1707.06347)", "clip-range")
    # None becomes `low`.
    high: float | None = positive(None, "upper clip range (DAPO, 2503.14476); default --clip-range", "clip-range-high")

    def __post_init__(self):
        if self.high is None:
            object.__setattr__(self, "high", self.low)
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"clip range must be >= 0 on both sides, got low {self.low}, high {self.high}")


@dataclasses.dataclass(frozen=True)
class ClipOptions(ClipRange):
    """A clip range with PPO's dual clip. ValueError for a bound out of range."""

    dual: float | None = option(None, "bound c of the loss where the advantage is negative (1912.09729 eq. 5)",
                                lambda value: value > 1, "above 1", "dual-clip")  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip must be > 1 or None, got {self.dual}")


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1−low, 1+high)), and where (bool) the second one is the larger. Any one shape."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    clipped = bounded > plain
    # Not torch.maximum: at a tie it would take half of its gradient from the clipped side.
    return torch.where(clipped, bounded, plain), clipped


def response_mean(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N] float64 mean of `values` [T] over the response tokens of each sequence; 0 for an empty response."""
    counts = response_counts(tokens.response_mask, tokens.cu_seqlens)
    return sums_by_sequence(values.double(), tokens.response_mask, tokens.cu_seqlens) / counts.clamp(min=1)


def on_tokens(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N] -> [T] in the dtype of the log-probabilities."""
    return spread(values, tokens.response_mask, tokens.cu_seqlens).to(tokens.logprobs.dtype)
