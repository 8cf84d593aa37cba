"""The advantage estimators, and their inputs: the scores of the whole step, the tokens of this rank.

An estimator is a function (StepData, AdvantageOptions) -> Advantages. Every rank has the scores of all responses of
the step, so a group's statistics are bitwise independent of the layout. Whitening over tokens sums over the ranks, so
it is independent of the layout up to float64 rounding.
"""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

from megarl.algorithms.advantages import discounted_to_go, gae
from megarl.algorithms.aggregation import local_moments, whiten
from megarl.algorithms.group_advantages import (
    grpo,
    on_turns,
    opo,
    returns_to_go,
    rloo,
    token_baseline_advantages,
    turn_rloo,
    turn_sums,
    unequal_groups,
)
from megarl.algorithms.packed import broadcast_to_tokens
from megarl.algorithms.preference_losses import PreferenceLoss, PreferenceOptions, best_and_worst, pair_gradient
from megarl.deferred import Tensor, no_grad, torch

NEEDS = frozenset({"values", "groups", "baselines", "parts"})  # of plug-ins; others are of built-in ones
NO_ADVANTAGE = "none"


@dataclasses.dataclass(frozen=True)
class StepData:
    """The inputs of an advantage estimator."""

    # Of all S responses of the step, the same on every rank:
    scores: Tensor  # [S] float64 sum of a response's token rewards: its score minus the KL penalty, if in the reward
    raw_scores: Tensor  # [S] float64 the same without the KL penalty: what tells good responses from bad ones
    groups: Tensor  # [S] int64 prompt that the response belongs to, from 0 in any order, groups of any size. One
    # without response tokens (its environment or its verifier failed) is alone in a group with a number of its own
    response_lengths: Tensor  # [S] int64 response tokens, without observation tokens
    baselines: Tensor | None  # [S] float64 reward of the greedy response to the same prompt
    # Of this rank's N sequences, packed into T tokens:
    sequence_ids: Tensor  # [N] int64 index of each sequence in the fields above
    token_rewards: Tensor  # [T] see `advantages.token_rewards`
    values: Tensor | None  # [T] V before the update
    response_mask: Tensor  # [T] bool
    cu_seqlens: Tensor  # [N+1]
    total: Callable[[Tensor], Tensor]  # sums a tensor over the ranks
    raw_token_rewards: Tensor | None = None  # [T] `token_rewards` without the KL penalty; None: there is none in them
    # [S] float64 Σ log π_old over the response tokens of all responses, and Σ log π_ref, 0 without a reference; None:
    # the estimator does not need log-probs
    logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    # [S, K] float64 rewards of the K terms of --reward that count and of the length penalty, before their weights [K],
    # whose weighted sum is `raw_scores` up to rounding, NaN of a term that abstains; None: the estimator needs none
    parts: Tensor | None = None
    part_weights: Tensor | None = None
    # [T] of this rank's tokens, before the update; None: there was no pass for them, or the estimator needs none
    token_logprobs: Tensor | None = None  # log π_old
    squares: Tensor | None = None  # Σπ_old² over the vocabulary


@dataclasses.dataclass(frozen=True)
class AdvantageOptions:
    """The user's options; `Estimator.options` names those that an estimator reads."""

    gamma: float = 1.0  # discount γ
    lam: float = 0.95  # λ of GAE
    length_alpha: float | None = None  # GAE: α of a λ that grows with the response's length, for the advantages alone
    group_std: bool = True  # grpo: divide by the group's standard deviation
    whiten: bool = False  # mean 0 and variance 1 over the response tokens of all ranks
    credit_turns: int = 0  # rloo: one advantage per turn, of episodes with at most so many; 0: one per episode
    preference: tuple[PreferenceLoss, PreferenceOptions] | None = None  # preference: the loss of pairs, its options


class Advantages(NamedTuple):
    """The result of an estimator."""

    advantages: Tensor  # [T] in the dtype of the token rewards, 0 outside the mask, no gradient
    returns: Tensor | None  # [T] targets of the critic, likewise; None without a critic


class Estimator(NamedTuple):
    """An estimator with its requirements."""

    function: Callable[[StepData, AdvantageOptions], Advantages]
    # Critic's values, several samples per prompt, greedy baselines, parts of rewards, log-probs, Σπ².
    needs: frozenset[str]
    options: frozenset[str]  # names of the AdvantageOptions that it reads
    whiten: bool  # default of the option `whiten`
    # Computes the advantages and, with them, metrics by name, the same on every rank; None: it has no metrics.
    measured: Callable[[StepData, AdvantageOptions], tuple[Advantages, dict[str, float]]] | None = None

    def run(self, step: StepData, options: AdvantageOptions) -> tuple[Advantages, dict[str, float]]:
        """The advantages, and metrics by name."""
        return self.measured(step, options) if self.measured else (self.function(step, options), {})


def gae_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16); returns are A + V, with A before whitening."""
    mask, cu_seqlens, length_alpha = step.response_mask, step.cu_seqlens, options.length_alpha
    advantages, returns = gae(
        step.token_rewards, step.values, mask, cu_seqlens, options.gamma, options.lam, length_alpha
    )
    return _finished(step, options, advantages, returns)


def by_group(
    function: Callable[..., Tensor], step: StepData, options: AdvantageOptions, reads_std: bool = False
) -> Advantages:
    """A response's advantage, by a function of `group_advantages`, on each of its tokens.

    `reads_std`: the function divides by the group's standard deviation, unless `group_std` is off.
    """
    std = {"std": options.group_std} if reads_std else {}
    return _on_tokens(step, options, function(step.scores, step.groups, raw_scores=step.raw_scores, **std))


def rloo_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_i = R_i − mean of the others' R on every token (RLOO, arXiv 2402.14740).

    With `credit_turns` each turn has its own: its return-to-go minus the mean of the others' at that turn.
    """
    if options.credit_turns:
        return _finished(step, options, _of_turns(step, options.credit_turns))
    return by_group(rloo, step, options)


def opo_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_i = R_i − Σ|o|R / Σ|o| over the group, on every token (OPO, arXiv 2505.23585)."""
    return _on_tokens(step, options, opo(step.scores, step.groups, step.response_lengths, raw_scores=step.raw_scores))


def reinforce_plus_plus_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_t = Σ_{k ≥ t} γ^{k−t}·r_k with the KL penalty in r, then whitened (REINFORCE++, arXiv 2501.03262)."""
    return _finished(step, options, _to_go(step, options.gamma))


def remax_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_t = Σ_{k ≥ t} r_k − R(greedy response to the prompt): ReMax (arXiv 2310.10505)."""
    return _finished(step, options, _to_go(step, 1.0) - _spread(step, step.baselines.double()))


def gdpo_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_i = Σ_k w_k·(R_ki − mean_G) / (std_G + ε) over the parts k of the reward, then whitened: GDPO (arXiv
    2601.05242). A part whose rewards are large or vary much does not hide the others. A response without a part is none
    of that part's group, and gets 0 for it."""
    alone = len(step.groups) + torch.arange(len(step.groups), device=step.groups.device)
    parts = []
    for part in step.parts.unbind(1):
        lacks = part.isnan()
        groups = torch.where(lacks, int(step.groups.max() if len(step.groups) else 0) + 1 + alone, step.groups)
        parts.append(grpo(part.nan_to_num(0.0), groups, std=options.group_std))
    return _on_tokens(step, options, torch.stack(parts, dim=1) @ step.part_weights)


def otb_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_t = G_t − B_t with the optimal token baseline of the group at each token position (OTB, arXiv 2602.07078)."""
    is_unequal = unequal_groups(step.raw_scores, step.groups)
    groups = torch.where(is_unequal, step.groups, -1)  # lost responses are alone in groups of large numbers
    shape = (max(int(groups.max()), 0) + 1, int(step.response_lengths.max())) if len(groups) else (0, 0)
    mask, cu_seqlens, own = step.response_mask, step.cu_seqlens, groups[step.sequence_ids]
    advantages = token_baseline_advantages(
        step.token_rewards, step.token_logprobs, step.squares, own, shape, mask, cu_seqlens, step.total
    )
    return _finished(step, options, advantages)


def no_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """A_t = 0: of a policy that learns from a teacher alone."""
    return Advantages(torch.zeros_like(step.token_rewards), None)


def preference_advantages(step: StepData, options: AdvantageOptions) -> Advantages:
    """Online preference learning: the gradient of a loss of each group's best and worst response, as advantages.

    A_i = −n · ∂L/∂ log π(y_i) for the mean loss L of the pairs, 0 for a response in no pair; n is the number of
    responses with tokens, by which `seq-mean-token-sum` divides. With it and `reinforce` the gradient is that of L.
    """
    return measured_preference(step, options)[0]


def measured_preference(step: StepData, options: AdvantageOptions) -> tuple[Advantages, dict[str, float]]:
    """`preference_advantages`, and `preference/…` of the pairs, at the policy before the update."""
    (best, worst, ties), (loss, its_options) = best_and_worst(step.raw_scores, step.groups), options.preference
    by_chosen, by_rejected, metrics = pair_gradient(
        best, worst, step.logprobs, step.reference_logprobs, step.response_lengths, loss, its_options
    )
    metrics |= {"pairs": float(len(best)), "ties": float(ties)}
    advantages = torch.zeros_like(step.logprobs)
    advantages[best], advantages[worst] = -by_chosen, -by_rejected
    unchanged = dataclasses.replace(options, whiten=False)
    found = _on_tokens(step, unchanged, (step.response_lengths > 0).sum() * advantages)
    return found, {f"preference/{name}": value for name, value in metrics.items()}


def estimator_of(function: Callable[[StepData, AdvantageOptions], Advantages]) -> Estimator:
    """Wrap a plug-in so that its result is checked, detached, and 0 outside the mask.

    `function` may have an attribute `needs`, names of `NEEDS`. It is assumed to read every option. If it needs "values"
    it must return the critic's targets as `returns`, else None. ValueError for an unknown need, or a wrong result.
    """
    name = getattr(function, "__qualname__", repr(function))
    needs = frozenset(getattr(function, "needs", ()))
    if not needs <= NEEDS:
        raise ValueError(f"needs of {name} must be from {sorted(NEEDS)}, got {sorted(needs)}")

    @wraps(function)
    @no_grad
    def checked(step: StepData, options: AdvantageOptions) -> Advantages:
        result = function(step, options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"{name} must return Advantages(advantages, returns), got {type(result).__name__}")
        advantages, returns = result
        if (returns is not None) != ("values" in needs):
            raise ValueError(f"{name} must give returns if, and only if, it needs values; its needs: {sorted(needs)}")
        return Advantages(*(None if field is None else masked(step, field) for field in (advantages, returns)))

    def masked(step: StepData, field: Tensor) -> Tensor:
        if field.shape != step.response_mask.shape:
            raise ValueError(f"{name} must return [T] = {list(step.response_mask.shape)}, got {list(field.shape)}")
        return torch.where(step.response_mask, field.detach(), 0.0).to(step.token_rewards.dtype)

    options = frozenset(field.name for field in dataclasses.fields(AdvantageOptions)) - {"preference"}
    return Estimator(function=checked, needs=needs, options=options, whiten=False)


def _on_tokens(step: StepData, options: AdvantageOptions, advantages: Tensor) -> Advantages:
    """The result of one advantage per response of the step [S]."""
    return _finished(step, options, _spread(step, advantages))


def _spread(step: StepData, values: Tensor) -> Tensor:
    """[S] -> [T]: the value of each response of the step, on the response tokens of this rank's sequences."""
    return broadcast_to_tokens(values[step.sequence_ids], step.response_mask, step.cu_seqlens)


def _to_go(step: StepData, gamma: float) -> Tensor:
    """[T] float64 returns-to-go of the token rewards."""
    return discounted_to_go(step.token_rewards.double(), step.response_mask, step.cu_seqlens, gamma)


def _of_turns(step: StepData, max_turns: int) -> Tensor:
    """[T] float64: the advantage of each token's turn, from the rewards of all responses of the step."""
    mask, cu_seqlens = step.response_mask, step.cu_seqlens
    fields = [field for field in (step.token_rewards, step.raw_token_rewards) if field is not None]
    tables = step.token_rewards.new_zeros(len(fields), len(step.groups), max_turns, dtype=torch.float64)
    tables[:, step.sequence_ids] = torch.stack([turn_sums(field, mask, cu_seqlens, max_turns) for field in fields])
    to_go = returns_to_go(step.total(tables))
    raw_to_go = to_go[-1].clone()
    # What is earned from the first turn on is the score, which a sum over turns may round otherwise.
    raw_to_go[:, 0] = step.raw_scores
    advantages = turn_rloo(to_go[0], step.groups, raw_to_go)
    return on_turns(advantages[step.sequence_ids], mask, cu_seqlens)


def _finished(
    step: StepData, options: AdvantageOptions, advantages: Tensor, returns: Tensor | None = None
) -> Advantages:
    """Whiten over all ranks if requested, and cast to the dtype of the token rewards."""
    if options.whiten:
        moments = step.total(local_moments(advantages, step.response_mask))
        advantages = whiten(advantages, step.response_mask, moments)
    return Advantages(advantages.to(step.token_rewards.dtype), returns)
