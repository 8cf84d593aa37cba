"""Reward functions: built-in verifiers, plug-ins and reward servers, combined by --reward."""

from megarl.rewards.base import Sample, Score, batched, grouped
from megarl.rewards.frameworks import of_openrlhf, of_trl, of_verl

__all__ = ["Sample", "Score", "batched", "grouped", "of_openrlhf", "of_trl", "of_verl"]
