"""Flags of what a run records for its report."""

import dataclasses

from megarl.flags.fields import not_negative


@dataclasses.dataclass(frozen=True)
class ReportSettings:
    """Report."""

    token_samples: int = not_negative(8, "responses of each step whose tokens are recorded one by one in tokens/: text,"
                                       " log-probs, advantage, value; 0: none", when="saved")  # fmt: skip
