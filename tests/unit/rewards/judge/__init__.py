"""Tests of megarl/rewards/judge/."""
