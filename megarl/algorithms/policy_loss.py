"""Inputs and outputs of policy losses, their options and flags, and shared functions: clipping, response means.

The losses are in `policy_losses/`. Statistics of a response count its response tokens only, not the observation
tokens between its turns. Means over a response are taken in float64, so that a long response loses no digits of its
ratio, and the ratio does not depend on the rest of the micro-batch.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.algorithms.packed import broadcast_to_tokens, require_same_shape, response_counts, sums_by_sequence
from megarl.deferred import Tensor, torch

# Bound of log-ratios (a ratio of 4.9e8). Without it exp overflows, and an infinite ratio gives the gradient
# 0·inf = NaN even where the loss is clipped.
LOG_RATIO_LIMIT = 20.0
OPTION_KINDS = (int, float, bool, str)  # types of a loss's option; each may also be None


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """A policy loss's input: a packed batch of N whole sequences, T tokens. ValueError when shapes differ."""

    logprobs: Tensor  # [T] log π_θ of the policy being trained; the only differentiable field
    old_logprobs: Tensor  # [T] log π_old of the policy at the start of the step
    advantages: Tensor  # [T]
    response_mask: Tensor  # [T] bool, True at response tokens
    cu_seqlens: Tensor  # [N+1]
    rollout_logprobs: Tensor | None = None  # [T] log μ of the policy that generated, by its engine; None: π_old did
    selected: Tensor | None = None  # [T] bool, what `PolicyLoss.select` has chosen in the mini-batch; None: nothing

    def __post_init__(self):
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            response_mask=self.response_mask,
            rollout_logprobs=self.behaviour_logprobs,
        )

    @property
    def behaviour_logprobs(self) -> Tensor:
        """[T] log μ: `rollout_logprobs`, or π_old's without them."""
        return self.old_logprobs if self.rollout_logprobs is None else self.rollout_logprobs

    @property
    def approx_kl(self) -> Tensor:
        """[T] old − new log-probability, no gradient."""
        return (self.old_logprobs - self.logprobs).detach()


class PolicyTerms(NamedTuple):
    """Per-token terms of a policy loss. Entries outside the response mask are undefined: the aggregation skips them."""

    loss: Tensor  # [T], differentiable in the log-probabilities; a sequence's loss is repeated on its tokens
    clipped: Tensor  # [T] bool, a bound replaced the ratio; such a token has no gradient, except in cispo
    approx_kl: Tensor  # [T] old − new log-probability (k1), no gradient; exactly 0 where both are equal


class PolicyLoss(NamedTuple):
    """A policy loss, its name in `--policy-loss`, and its options."""

    name: str
    function: Callable[..., PolicyTerms]
    options: Any  # the second argument of `function`: an instance of a frozen dataclass, or None
    reads_rollout: bool = False  # its ratio is π_θ/μ, so that a weight π_old/μ would count twice
    # Both are asked before the update of a mini-batch, on all ranks, about this rank's tokens of it, of which those of
    # the mask have a loss; `total` sums a tensor over the ranks.
    # (PolicyTokens whose π_θ is π_old, options, [T] float64 in (0, 1): a random number of each token, whatever rank
    # holds it, total) -> `PolicyTokens.selected`; None: it selects nothing
    select: Callable[..., Tensor] | None = None
    # (PolicyTokens, options, [N] int64 prompt that a response is to, from 0, the same numbers on all ranks, how many
    # prompts all ranks have, total) -> advantages [T] in the place of the estimator's; None: the estimator's
    compare: Callable[..., Tensor] | None = None

    def flags(self) -> dict[str, dataclasses.Field]:
        """The fields of its options by flag, without leading dashes.

        A field's flag is `<loss>-<field>`, unless `option` sets another one.
        """
        fields = () if self.options is None else dataclasses.fields(self.options)
        return {f.metadata.get("flag") or f"{self.name}-{f.name}".replace("_", "-"): f for f in fields}

    def with_options(self, values: dict[str, object]) -> "PolicyLoss":
        """The loss with options from flags without leading dashes; ValueError if its options reject a value."""
        chosen = {field.name: values[flag] for flag, field in self.flags().items() if flag in values}
        return self._replace(options=type(self.options)(**chosen))

    def values(self) -> dict[str, object]:
        """The options' values by flag."""
        return {flag: getattr(self.options, field.name) for flag, field in self.flags().items()}


def option(default, text: str, check: Callable | None = None, allowed: str = "", flag: str | None = None):
    """A dataclass field of a loss's options, with its flag's help text and name without dashes (default
    `<loss>-<field>`). `check` says whether a value is allowed, `allowed` the same in words."""
    return dataclasses.field(default=default, metadata={"help": text, "check": check, "allowed": allowed, "flag": flag})


def positive(default: float | None, text: str, flag: str | None = None):
    """An `option` that is a number above 0."""
    return option(default, text, lambda value: value > 0, "a number above 0", flag)


def positive_finite(default: float, text: str):
    """An `option` that is a finite number above 0."""
    return option(default, text, lambda value: 0 < value < math.inf, "a finite number above 0")


@dataclasses.dataclass(frozen=True)
class ClipRange:
    """Bounds of the ratio, applied by each loss in its own way."""

    low: float = positive(0.2, "lower clip range ε (1707.06347)", "clip-range")
    # None: the same as `low`.
    high: float | None = positive(None, "upper clip range (DAPO, 2503.14476); default --clip-range", "clip-range-high")

    def __post_init__(self):
        if self.high is None:
            object.__setattr__(self, "high", self.low)


@dataclasses.dataclass(frozen=True)
class ClipOptions(ClipRange):
    """A clip range with PPO's dual clip."""

    dual: float | None = option(
        None,
        "bound c of the loss where the advantage is negative (1912.09729 eq. 5)",
        lambda value: value > 1,
        "above 1",
        "dual-clip",
    )


def option_kinds(loss: PolicyLoss) -> dict[str, type]:
    """The type of each flag's values. ValueError for a type that a flag cannot have."""
    hints, types_by_flag = typing.get_type_hints(type(loss.options)), {}
    for flag, field in loss.flags().items():
        hint = hints[field.name]
        kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        kinds = [kind for kind in kinds if kind is not types.NoneType]
        if len(kinds) != 1 or kinds[0] not in OPTION_KINDS:
            raise ValueError(f"option {field.name} of {loss.name} is {hint}; allowed: int, float, bool, str, or | None")
        types_by_flag[flag] = kinds[0]
    return types_by_flag


def policy_loss_of(name: str, function: Callable[[PolicyTokens, object], PolicyTerms]) -> PolicyLoss:
    """Wrap a plug-in policy loss.

    Its attribute `options`, a dataclass whose fields all have defaults (else ValueError), defines its options; without
    it they are `ClipOptions`. An attribute `reads_rollout` says that its ratio is to the rollout's policy.
    """
    kind = getattr(function, "options", ClipOptions)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"options of {name} must be a dataclass, not {kind!r}")
    fields, missing = dataclasses.fields(kind), dataclasses.MISSING
    without = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    if without:
        raise ValueError(f"options of {name} need defaults: {', '.join(without)}")
    loss = PolicyLoss(name, function, kind(), bool(getattr(function, "reads_rollout", False)))
    option_kinds(loss)
    return loss


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1−low, 1+high)), and where the second one is larger (bool). All tensors have one shape."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    clipped = bounded > plain
    # Not torch.maximum: at a tie it takes half of the gradient from the clipped side.
    return torch.where(clipped, bounded, plain), clipped


def response_mean(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N] float64 mean of `values` [T] over the response tokens of each sequence; 0 for an empty response."""
    counts = response_counts(tokens.response_mask, tokens.cu_seqlens)
    return sums_by_sequence(values.double(), tokens.response_mask, tokens.cu_seqlens) / counts.clamp(min=1)


def response_log_ratio(log_ratio: Tensor, tokens: PolicyTokens) -> Tensor:
    """[T] float64 Σ of `log_ratio` over the response, within ± LOG_RATIO_LIMIT, on its tokens; 0 outside the mask."""
    sums = sums_by_sequence(log_ratio.double(), tokens.response_mask, tokens.cu_seqlens)
    return broadcast_to_tokens(sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), tokens.response_mask, tokens.cu_seqlens)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) without overflow: the logarithm within ± LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def on_tokens(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Spread [N] to response tokens [T], in the dtype of the log-probabilities."""
    return broadcast_to_tokens(values, tokens.response_mask, tokens.cu_seqlens).to(tokens.logprobs.dtype)
