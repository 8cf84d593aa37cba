"""What turns a response into a reward: verifiers, plug-ins and servers, under the names and weights of --reward."""

from megarl.rewards.base import Sample, Score, batched

__all__ = ["Sample", "Score", "batched"]
