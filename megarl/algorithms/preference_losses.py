"""The preference losses of a policy, their inputs and outputs, and Bradley and Terry's model.

Each loss turns sums of log-probs into the loss of each pair and the rewards that the policy gives implicitly. The sums
are in float64, so that a long response loses no digits of a difference. Reward models share Bradley and Terry's model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.algorithms.group_advantages import group_sizes
from megarl.algorithms.packed import require_same_shape
from megarl.deferred import Tensor, torch


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float = 0.0) -> Tensor:
    """−log σ(c − r − m) + κ·(c + r)² of each pair: Bradley and Terry's model of preferences (2203.02155 eq. 1).

    The margin m requires a larger difference where the preference is strong (2307.09288 eq. 2). Only differences of
    scores enter the first term; κ pulls their mean to 0 (2312.09244 eq. 2).

    All are [P]; differentiable in the scores. log 2 where both scores are equal and m and κ are 0.
    """
    require_same_shape(chosen=chosen, rejected=rejected, margin=margin)
    terms = -torch.nn.functional.logsigmoid(chosen - rejected - margin.detach())
    return terms + centring * (chosen + rejected).square() if centring else terms


@dataclasses.dataclass(frozen=True)
class PairLogprobs:
    """A preference loss's input: P pairs, all fields [P]. ValueError when shapes differ."""

    chosen: Tensor  # float64 Σ log π over the tokens of the preferred response; differentiable
    rejected: Tensor  # of the other; differentiable
    chosen_tokens: Tensor  # tokens of the preferred response, at least 1
    rejected_tokens: Tensor
    reference_chosen: Tensor  # float64 Σ log π_ref; 0 for losses that need no reference
    reference_rejected: Tensor
    margin: Tensor  # m ≥ 0 by which the preferred response should be better

    def __post_init__(self):
        require_same_shape(**vars(self))


class PreferenceOptions(NamedTuple):
    """The options of preference losses; each loss reads its own."""

    beta: float = 0.1  # β > 0, scale of the implicit rewards
    label_smoothing: float = 0.0  # ε in [0, ½): probability that a label is wrong
    gamma: float = 1.0  # γ ≥ 0: difference that SimPO asks for
    coefficient: float = 1.0  # ≥ 0: weight of the second term of ORPO and RPO
    desirable_weight: float = 1.0  # > 0: λ_D of KTO
    undesirable_weight: float = 1.0  # > 0: λ_U of KTO


class PreferenceTerms(NamedTuple):
    """Terms of a preference loss, and the rewards that a policy gives implicitly; all [P]."""

    loss: Tensor  # differentiable in the log-probs
    chosen_reward: Tensor  # no gradient
    rejected_reward: Tensor  # no gradient


class PreferenceLoss(NamedTuple):
    """A preference loss, its name in `--preference-loss`, and what it reads."""

    name: str
    function: Callable[..., Any]  # of `PairLogprobs` and `PreferenceOptions` to `PreferenceTerms`, if it reads pairs
    options: frozenset[str]  # fields of `PreferenceOptions`
    needs_reference: bool = True
    reads_pairs: bool = True
    reads_margin: bool = False
    defaults: PreferenceOptions = PreferenceOptions()


# What is measured of pairs, in the order of `pair_metrics`.
PAIR_METRICS = "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"


def pair_metrics(pairs: PairLogprobs, terms: PreferenceTerms) -> list[Tensor]:
    """[P] float64 each of `PAIR_METRICS`, without gradient."""
    won, lost = terms.chosen_reward, terms.rejected_reward
    logprobs = pairs.chosen.detach(), pairs.rejected.detach()
    return [terms.loss.detach(), (won > lost).double(), won - lost, won, lost, *logprobs]


def dpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """−log σ(r_w − r_l − m) with the implicit rewards r = β·(log π − log π_ref) (2305.18290 eq. 7).

    A margin m is the offset of ODPO (2402.10571); `label_smoothing` is that of `_smoothed`.
    """
    chosen, rejected = (options.beta * drift for drift in _drifts(pairs))
    return _terms(_smoothed(chosen, rejected, pairs.margin, options.label_smoothing), chosen, rejected)


def ipo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """(d_w − d_l − 1/(2β))², where d is the drift log π − log π_ref as a mean over a response's tokens.

    The difference of the drifts is to have a given value, so that it does not grow without end. 2310.12036 eq. 17 has
    sums; means, as its authors use them in their experiments, do not depend on lengths.
    """
    chosen, rejected = _drifts(pairs)
    chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    loss = (chosen - rejected - 1 / (2 * options.beta)).square()
    return _terms(loss, options.beta * chosen, options.beta * rejected)


def simpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """−log σ(r_w − r_l − γ) with rewards r = β · the mean log-prob of a response's tokens (2405.14734 eq. 6)."""
    chosen, rejected = (options.beta * mean for mean in _token_means(pairs))
    gamma = chosen.new_full(chosen.shape, options.gamma)
    return _terms(_smoothed(chosen, rejected, gamma, options.label_smoothing), chosen, rejected)


def orpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """−mean log π(y_w) − λ·log σ(log odds_w − log odds_l) (2403.07691 eq. 6 and 7); rewards are λ · the means.

    Fine-tuning on the preferred response, with a penalty on the odds of the other.
    """
    chosen, rejected = _token_means(pairs)
    penalty = -torch.nn.functional.logsigmoid(log_odds(chosen) - log_odds(rejected))
    return _terms(-chosen + options.coefficient * penalty, options.coefficient * chosen, options.coefficient * rejected)


def rpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """DPO's loss − α · the mean log-prob of the preferred response's tokens (2404.19733 eq. 1), which keeps its
    probability from falling."""
    terms = dpo(pairs, options)
    return terms._replace(loss=terms.loss - options.coefficient * _token_means(pairs)[0])


def kto(
    logprobs: Tensor, reference: Tensor, is_desirable: Tensor, divergence: Tensor, options: PreferenceOptions
) -> tuple[Tensor, Tensor]:
    """λ_D · (1 − σ(r − z)) of a desirable response, λ_U · (1 − σ(z − r)) of another (2402.01306 eq. 8).

    r = β · (log π − log π_ref) is the implicit reward, z = β · `divergence` that of a response which says nothing of
    the prompt.

    Args:
        logprobs: [N] float64 Σ log π over the tokens of each response; differentiable.
        reference: [N] float64 Σ log π_ref.
        is_desirable: [N] bool.
        divergence: [] estimate of KL(π‖π_ref), at least 0; no gradient (`mismatched_divergence`).

    Returns:
        [N] losses, and [N] rewards r without gradient.
    """
    reward = options.beta * (logprobs - reference)
    difference = reward - options.beta * divergence.detach()
    signed = torch.where(is_desirable, difference, -difference)
    weights = signed.new_tensor([options.undesirable_weight, options.desirable_weight])[is_desirable.long()]
    return weights * torch.sigmoid(-signed), reward.detach()


def mismatched_divergence(drift: Tensor, count: Tensor) -> Tensor:
    """max(0, Σ drift / count): KL(π‖π_ref), estimated on responses to other prompts.

    `drift`: Σ (log π − log π_ref) over such responses; `count`: their number.
    """
    return (drift / count).clamp(min=0)


def log_odds(mean_logprob: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp(mean log-prob), the geometric mean of a response's token probabilities.

    A response whose tokens are certain has infinite odds; its mean is bounded at −1e-12, without gradient beyond.
    """
    bounded = mean_logprob.clamp(max=-1e-12)
    return bounded - torch.log(-torch.expm1(bounded))


def _drifts(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """log π − log π_ref of both responses, [P] each."""
    return pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected


def _token_means(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """log π of both responses as means over their tokens, [P] each."""
    return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens


def _smoothed(chosen: Tensor, rejected: Tensor, margin: Tensor, epsilon: float) -> Tensor:
    """(1 − ε)·L(chosen, rejected, m) + ε·L(rejected, chosen, −m), where L is `bradley_terry`: labels may be wrong with
    probability ε (Mitchell 2023, "A note on DPO with noisy preferences")."""
    terms = bradley_terry(chosen, rejected, margin)
    return terms if not epsilon else (1 - epsilon) * terms + epsilon * bradley_terry(rejected, chosen, -margin)


def _terms(loss: Tensor, chosen_reward: Tensor, rejected_reward: Tensor) -> PreferenceTerms:
    """The terms of a loss; rewards lose their gradients."""
    return PreferenceTerms(loss, chosen_reward.detach(), rejected_reward.detach())


# -- online: the best and the worst response of each group are a pair, as in online DPO (2402.04792) ---------------
# A preference loss depends on the policy by the log-probs of whole responses, so its gradient is Σ_i c_i · ∇ log π(y_i)
# with c_i = ∂L/∂ log π(y_i). The plain policy gradient with the advantages −c_i is therefore the gradient of the loss,
# at the policy whose log-probs the c_i are computed from: exact for the first update after them.


def best_and_worst(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, int]:
    """The pair of each group, from scores [S] and groups [S] as of `group_advantages`: indices [P] int64 of its best
    response and of its worst one, the first where several are; the number of groups of several equal scores, which have
    no pair."""
    sizes, positions = group_sizes(scores, groups), torch.arange(len(scores), device=scores.device)
    extremes, firsts = [], []
    for kind, start in (("amax", -torch.inf), ("amin", torch.inf)):
        extreme = scores.new_full(sizes.shape, start).scatter_reduce(0, groups, scores, kind)
        candidates = torch.where(scores == extreme[groups], positions, len(scores))
        firsts.append(positions.new_full(sizes.shape, len(scores)).scatter_reduce(0, groups, candidates, "amin"))
        extremes.append(extreme)
    differ = extremes[0] > extremes[1]
    return firsts[0][differ], firsts[1][differ], int(((sizes > 1) & ~differ).sum())


def pair_gradient(
    best: Tensor,
    worst: Tensor,
    logprobs: Tensor,
    reference: Tensor,
    tokens: Tensor,
    loss: PreferenceLoss,
    options: PreferenceOptions,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The gradient [P] float64 of a preference loss, as a mean over the pairs, by the Σ log π of the chosen and of the
    rejected response; and means of `PAIR_METRICS`, without pairs none.

    Args:
        best, worst: [P] int64 the pairs, as of `best_and_worst`.
        logprobs: [S] float64 Σ log π over the tokens of each response.
        reference: [S] float64 Σ log π_ref; not read by losses without a reference.
        tokens: [S] int64 tokens of each response; at least 1 in a pair.
    """
    with torch.enable_grad():
        chosen, rejected = (logprobs[at].detach().requires_grad_() for at in (best, worst))
        of_pairs = PairLogprobs(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=tokens[best].double(),
            rejected_tokens=tokens[worst].double(),
            reference_chosen=reference[best],
            reference_rejected=reference[worst],
            margin=torch.zeros_like(chosen),
        )
        terms = loss.function(of_pairs, options)
        by_chosen, by_rejected = torch.autograd.grad(terms.loss.sum() / max(len(best), 1), (chosen, rejected))
    means = torch.stack(pair_metrics(of_pairs, terms)).mean(1).tolist() if len(best) else []
    return by_chosen, by_rejected, dict(zip(PAIR_METRICS, means, strict=False))
