"""Flags of the gap between the policy that generated and the one that is trained: old log-probs, weights, rejection."""

import dataclasses

from megarl.algorithms.rejection import parse_bounds
from megarl.algorithms.rollout_correction import CORRECTIONS, LEVELS
from megarl.flags.fields import flag, one_of, parses, positive

RECOMPUTE, ROLLOUT, INTERPOLATE = OLD_LOGPROBS = ("recompute", "rollout", "interpolate")


@dataclasses.dataclass(frozen=True)
class CorrectionSettings:
    """What stands for the policy before the step, and what is done where the rollout's policy μ is another one."""

    old_logprobs: str = one_of(RECOMPUTE, OLD_LOGPROBS, "log-probs of π_old: those of a pass before the updates"
                                " (recompute), those of the rollout, without that pass (rollout), or the latter moved"
                                " towards the trained policy by a token's age (interpolate)",
                                when="trained")  # fmt: skip
    rollout_correction: str = one_of("none", CORRECTIONS, "weight the loss by π_old/μ, where μ is the rollout policy:"
                                      " truncated (tis), masked (mis) or icepop; none: no weights")  # fmt: skip
    rollout_correction_level: str = one_of("token", LEVELS, "ratio per token, per sequence, or geometric mean over a"
                                            " sequence; also of the metrics without correction")  # fmt: skip
    rollout_correction_cap: float = positive(2.0, "largest importance ratio", when="correction")
    rollout_correction_floor: float | None = positive(None, "icepop: smallest importance ratio", when="icepop")
    rollout_correction_normalize: bool = flag(False, "divide the weights by their mean over the step's tokens, or"
                                               " responses", when="correction")  # fmt: skip
    rollout_rejection: str | None = flag(None, "leave tokens or responses whose π_old/μ is out of bounds out of the"
                                          " actor's loss: NAME=BOUND …, as mean-abs=0.1 token-k1=0.5:2; a name is"
                                          " token, sum, mean or max (over the response) and k1, k2, k3 or abs",
                                          parses(parse_bounds), "NAME=BOUND …, each name once: token, sum, mean or max,"
                                          " then -k1 with LOW:HIGH of the ratio, or -k2, -k3, -abs with a number above"
                                          " 0 (max has no k1)", when="trained", several=True)  # fmt: skip

    @property
    def corrects_before_updates(self) -> bool:
        """Whether what is left of the step, or its weights, depends on π_old of all its tokens."""
        return self.rollout_correction_normalize or self.rollout_rejection is not None or self.old_logprobs != RECOMPUTE
