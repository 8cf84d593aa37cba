"""Reward functions: built-in verifiers, plug-ins and reward servers, combined by --reward."""

from megarl.rewards.base import Sample, Score, batched, grouped
from megarl.rewards.frameworks import of_openrlhf, of_trl, of_verl

__all__ = ["VERIFIERS", "Sample", "Score", "batched", "grouped", "of_openrlhf", "of_trl", "of_verl"]

# Name of a term of --reward -> its `base.BuiltIn`. `expression` has the terms that no verifier scores.
VERIFIERS = {
    "exact-match": "megarl.rewards.text:EXACT_MATCH",
    "regex": "megarl.rewards.text:REGEX",
    "math-verify": "megarl.rewards.mathematics:MATH_VERIFY",
    "reasoning-gym": "megarl.rewards.tasks:REASONING_GYM",
    "format": "megarl.rewards.text:FORMAT",
    "length": "megarl.rewards.text:LENGTH",
    "code": "megarl.rewards.code:CODE",
    "remote": "megarl.rewards.remote:REMOTE",
}
