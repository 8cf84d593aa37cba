"""How tokens are sampled, as data: processes without torch read it, too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled. The rollout's log-probs are those of the temperature-scaled policy over the whole
    vocabulary, as training recomputes them; top-k, top-p and min-p restrict the sampling, not the log-probs."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    min_p: float = 0.0  # least probability of a token, as a share of the most likely one's (2407.01082)

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens of the vocabulary may be excluded."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
