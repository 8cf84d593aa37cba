"""Tests of megarl/rollout/episodes/."""
