"""Rewards of tokens, their discounted sums over the rest of a response, generalised advantage estimation, and the
critic that it needs: its loss per token, before aggregation, and how much of the returns' variance it explains."""

from megarl.algorithms.aggregation import centred_squares, local_moments
from megarl.algorithms.packed import require_same_shape, response_tokens, token_sequences
from megarl.deferred import Tensor, no_grad, torch


@no_grad
def token_rewards(
    scores: Tensor, kl: Tensor, kl_coefficient: float, response_mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Reward of each response token: −β·kl, plus the sequence's score on its last response token.

    Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593) §2.2; InstructGPT (arXiv 2203.02155) §3.5.
    From `scores` [N] and `kl` [T]: [T] in the dtype of `kl`, 0 outside the mask. The score of a sequence without
    response tokens is dropped.
    """
    require_same_shape(kl=kl, response_mask=response_mask)
    response = response_tokens(response_mask, cu_seqlens)
    if scores.shape != response.counts.shape:
        raise ValueError(f"scores must be [{response.counts.numel()}], one a sequence, got {list(scores.shape)}")
    rewards = torch.where(response_mask, -kl_coefficient * kl, torch.zeros_like(kl))
    is_last = response.ranks == response.counts[response.sequences] - 1
    # No position repeats: a sequence has one last response token.
    rewards[response.positions[is_last]] += scores[response.sequences[is_last]].to(kl.dtype)
    return rewards


@no_grad
def discounted_to_go(terms: Tensor, response_mask: Tensor, cu_seqlens: Tensor, factor: float | Tensor) -> Tensor:
    """G_t = x_t + factor·G_{t+1} over the response tokens of each sequence, G = 0 after the last one.

    t + 1 is the *next response token*: observation tokens between two turns are skipped; they neither reset nor
    discount. With rewards and factor γ this is the return-to-go (Reinforcement Learning: An Introduction, 2nd ed.,
    eq. 3.9); with temporal differences and γλ it is GAE (arXiv 1506.02438, eq. 16).

    Args:
        terms: [T] x, read at response tokens only.
        factor: in [0, 1], else ValueError; or [N], one of each sequence, which is not checked.

    Returns:
        [T] in the dtype of `terms`, 0 outside the mask, no gradient. A sequence's results do not depend on the other
        sequences of the batch, to the last bit.
    """
    require_same_shape(terms=terms, response_mask=response_mask)
    if not isinstance(factor, torch.Tensor) and not 0 <= factor <= 1:
        raise ValueError(f"factor must be in [0, 1], got {factor}")
    response = response_tokens(response_mask, cu_seqlens)
    number_of_sequences = response.counts.numel()
    longest = int(response.counts.max()) if number_of_sequences else 0

    # Time is the first dimension, so that each step reads whole rows. Padding comes after the response, where G = 0.
    rows = terms.new_zeros(longest + 1, number_of_sequences)
    rows[response.ranks, response.sequences] = terms[response.positions]
    for step in reversed(range(longest)):
        # A plain product and sum, no fused multiply-add, so that rounding is the same at every position and backend.
        rows[step] += factor * rows[step + 1]

    to_go = torch.zeros_like(terms)
    to_go[response.positions] = rows[response.ranks, response.sequences]
    return to_go


@no_grad
def discounted_sums(terms: Tensor, response_mask: Tensor, cu_seqlens: Tensor, factor: float) -> Tensor:
    """`discounted_to_go` for losses: in log₂ T rounds and without waiting for the device, up to rounding.

    A round lets each token take in what twice as many tokens after it sum up to. A sequence's results do not depend on
    the other sequences of the batch, to the last bit.
    """
    require_same_shape(terms=terms, response_mask=response_mask)
    total, sums = len(terms), terms.masked_fill(~response_mask, 0.0)
    sequences, factors = token_sequences(response_mask, cu_seqlens), torch.ones_like(sums)
    factors = torch.where(response_mask, factor, factors)  # of an observation: 1
    if total:
        is_last = sequences != torch.cat([sequences[1:], sequences.new_full((1,), -1)])
        factors = factors.masked_fill(is_last, 0.0)
    reach = 1
    while reach < total:
        nothing = sums.new_zeros(reach)
        sums = sums + factors * torch.cat([sums[reach:], nothing])
        factors = factors * torch.cat([factors[reach:], nothing])
        reach *= 2
    return sums.masked_fill(~response_mask, 0.0)


@no_grad
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    length_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the response tokens of each sequence.

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  return = A + V, where t + 1 is the next response token, as in
    `discounted_to_go`. After the last response token V is 0.

    Args:
        rewards, values: [T], read at response tokens only; V is of the state before the token.
        gamma, lam: γ and λ; ValueError unless their product is in [0, 1].
        length_alpha: α > 0 of VAPO's length-adaptive λ (arXiv 2504.05118, eq. 8): the advantages of a response of l
            tokens have 1 − 1/(α·l), at least 0, in the place of λ. Returns keep `lam`.

    Returns:
        advantages [T], returns [T]: dtype of `values`, else as of `discounted_to_go`.
    """
    require_same_shape(rewards=rewards, values=values, response_mask=response_mask)
    response = response_tokens(response_mask, cu_seqlens)
    current, is_last = values[response.positions], response.ranks == response.counts[response.sequences] - 1
    following = torch.where(is_last, 0.0, current.roll(-1))
    deltas = torch.zeros_like(values)
    # Plain products and sums, no fused multiply-add, so that rounding is the same at every position and backend.
    deltas[response.positions] = (rewards[response.positions] + gamma * following - current).to(values.dtype)
    advantages = discounted_to_go(deltas, response_mask, cu_seqlens, gamma * lam)
    returns = torch.where(response_mask, advantages + values, torch.zeros_like(values))
    if length_alpha is not None:
        of_responses = (1 - 1 / (length_alpha * response.counts.double())).clamp(min=0).to(deltas.dtype)
        advantages = discounted_to_go(deltas, response_mask, cu_seqlens, gamma * of_responses)
    return advantages, returns


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) of each token, differentiable in the values; and bool where
    the clipped value has the larger error, so that the token has no gradient.

    The value clipping of the PPO reference implementation (openai/baselines, ppo2), not in the paper.

    V_old, at the start of the step, and R, the targets, are constants; all are [T].
    """
    require_same_shape(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    plain = (values - returns).square()
    bounded = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    clipped = bounded > plain
    # Not torch.maximum: at a tie it takes half of the gradient from the clipped side.
    return 0.5 * torch.where(clipped, bounded, plain), clipped


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Sums for `explained_variance` of predictions V and targets R [T], to be added over micro-batches and ranks:
    float64 [5] = (count, ΣR, ΣR², Σ(R−V), Σ(R−V)²)."""
    require_same_shape(values=values, returns=returns, mask=mask)
    residuals = returns.double() - values.double()
    return torch.cat([local_moments(returns, mask), local_moments(residuals, mask)[1:]])


def explained_variance(moments: Tensor) -> float:
    """1 − Var[R − V] / Var[R] from all-reduced `explained_variance_moments` [5].

    1: the critic is perfect up to a constant; 0: no better than a constant; below 0: worse. 0.0 if all returns are
    equal, or with fewer than two tokens.
    """
    count, returns, returns_squared, residuals, residuals_squared = moments.double().unbind()
    variance = centred_squares(count, returns, returns_squared)
    if variance == 0:
        return 0.0
    return float(1 - centred_squares(count, residuals, residuals_squared) / variance)
