"""Tests of megarl/rollout/."""
