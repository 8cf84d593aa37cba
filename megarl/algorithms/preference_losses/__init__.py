"""The preference losses of a policy by name: one file each."""

from megarl.algorithms.preference_losses import dpo, ipo, kto, orpo, rpo, simpo

PREFERENCE_LOSSES = {module.LOSS.name: module.LOSS for module in (dpo, ipo, simpo, orpo, rpo, kto)}
