"""Flags of the reference policy, the KL to it and its refreshes, and of the moving average of the trained weights."""

import dataclasses

from megarl.algorithms.kl import KL_KINDS
from megarl.flags.fields import TRAINING, flag, not_negative, one_of, positive


@dataclasses.dataclass(frozen=True)
class ReferenceSettings:
    """The KL to the reference, and its refreshes."""

    kl_coefficient: float = not_negative(0.05, "KL coefficient β to the reference policy (2203.02155); 0: no KL")
    kl_in: str = one_of("reward", ("reward", "loss"), "add the KL to the reward (2203.02155) or to the loss"
                         " (2402.03300)", when="kl")  # fmt: skip
    kl_estimator: str = one_of("k1", KL_KINDS, "KL estimator: k1, k2, k3 (joschu.net/blog/kl-approx.html); k1+, k3+:"
                                " with the gradient of k2; k3-unbiased: times π_θ/π_old (2512.02556)",
                                when="kl")  # fmt: skip
    kl_controller: str = one_of("fixed", ("fixed", "adaptive"), "fixed or adaptive β (1909.08593 §2.2)", when="kl")
    kl_target: float | None = positive(None, "target KL per response of the adaptive β, in nats (1909.08593)",
                                        when="adaptive")  # fmt: skip
    kl_horizon: float = positive(10000, "horizon of the adaptive β, responses (1909.08593)", when="adaptive")
    reference_update_interval: int = not_negative(0, "steps after which the reference gets the actor's weights,"
                                                   " each time (2505.24864); 0: never", when="reference")  # fmt: skip
    reference_mixup: float = flag(1.0, "α of that: w_ref ← α·w + (1 − α)·w_ref (2404.09656)",
                                   lambda v: 0 < v <= 1, "above 0, at most 1", when="refreshes")  # fmt: skip
    # The moving average of the weights.
    ema_decay: float | None = flag(None, "keep an exponential moving average of the trained weights with this decay"
                                    " D: e ← D·e + (1 − D)·w after each step; default: none", lambda v: 0 < v < 1,
                                    "above 0, below 1", programs=TRAINING, when="trained")  # fmt: skip
    evaluate_ema: bool = flag(False, "evaluate the moving average instead of the weights that are trained",
                               programs=TRAINING, when="average")  # fmt: skip
