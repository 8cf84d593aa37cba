"""Tests of megarl/rewards/."""
