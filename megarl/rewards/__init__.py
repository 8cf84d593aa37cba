"""Reward functions: built-in verifiers, plug-ins and reward servers, combined by --reward."""

from megarl.rewards.base import Sample, Score, batched, grouped

__all__ = ["Sample", "Score", "batched", "grouped"]
