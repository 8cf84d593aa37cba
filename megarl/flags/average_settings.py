"""Flags of the moving average of the trained weights."""

import dataclasses

from megarl.flags.fields import TRAINING, flag


@dataclasses.dataclass(frozen=True)
class AverageSettings:
    """The moving average of the weights."""

    ema_decay: float | None = flag(None, "keep an exponential moving average of the trained weights with this decay"
                                    " D: e ← D·e + (1 − D)·w after each step; default: none", lambda v: 0 < v < 1,
                                    "above 0, below 1", programs=TRAINING, when="trained")  # fmt: skip
    evaluate_ema: bool = flag(False, "evaluate the moving average instead of the weights that are trained",
                               programs=TRAINING, when="average")  # fmt: skip
