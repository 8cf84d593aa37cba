"""How far π_old is from the rollout policy μ, by staleness: the policy updates since a token was generated."""

from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.rollout_correction import LOG_WEIGHT_LIMIT
from megarl.deferred import Tensor, no_grad, torch

NONE = -1.0  # stands for the largest gap of no tokens


@no_grad
def proximal_logprobs(rollout_logprobs: Tensor, logprobs: Tensor, staleness: Tensor, progress: float) -> Tensor:
    """[T] log π_prox = log μ + a·(log π_θ − log μ): stands for π_old of tokens that an older policy generated.

    A policy that moves steadily from μ to π_θ was π_old after the share a = s / (s + progress) of its way. A token of
    π_old itself (s = 0) has log μ; before the first update a stale token has log π_θ, which is then log π_old.

    Args:
        rollout_logprobs, logprobs: [T] log μ and log π_θ.
        staleness: [T] s, the policy's steps between μ and π_old.
        progress: share of the step's updates that were made, in [0, 1].
    """
    age = staleness.to(logprobs.dtype)
    share = torch.where(staleness > 0, age / (age + progress).clamp(min=1e-30), 0.0)
    return torch.lerp(rollout_logprobs, logprobs, share)  # exact at 0 and 1


@no_grad
def staleness_maxima(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, staleness: Tensor) -> Tensor:
    """float64 [2], to be maximized over replicas: largest |log π_old − log μ| of the tokens that are not stale, and
    largest staleness.

    Args:
        old_logprobs, rollout_logprobs: [T] log π_old and log μ.
        mask: [T] bool, the response tokens.
        staleness: [T] int32.
    """
    fresh = mask & (staleness == 0)
    gaps = (old_logprobs - rollout_logprobs)[fresh].abs().double()
    stale = staleness[mask].double()
    return torch.stack([torch.cat([x, x.new_tensor([least])]).amax() for x, least in ((gaps, NONE), (stale, 0.0))])


@no_grad
def staleness_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, staleness: Tensor, largest: int
) -> Tensor:
    """float64 [2 · (largest + 1)], to be added over replicas: tokens of each staleness, then their sums of k3.

    `largest`: staleness of all replicas; other arguments as of `staleness_maxima`.
    """
    k3 = kl_estimate(rollout_logprobs.double(), old_logprobs.double(), "k3", log_ratio_limit=LOG_WEIGHT_LIMIT)[mask]
    index, zeros = staleness[mask].long(), k3.new_zeros(largest + 1)
    return torch.cat([zeros.index_add(0, index, torch.ones_like(k3)), zeros.index_add(0, index, k3)])


def staleness_report(maxima: Tensor, sums: Tensor) -> dict[str, float]:
    """Diagnostics of the whole batch from `staleness_maxima` and `staleness_sums`.

    "rollout/logprob_gap_max_fresh", and KL(μ || π_old) of the tokens of each staleness k as "correction/kl_k3_age_<k>";
    none of tokens that do not occur.
    """
    fresh, (counts, k3) = float(maxima[0]), sums.view(2, -1).tolist()
    found = {} if fresh == NONE else {"rollout/logprob_gap_max_fresh": fresh}
    ages = [age for age, count in enumerate(counts) if count]
    return found | {f"correction/kl_k3_age_{age}": k3[age] / counts[age] for age in ages}
