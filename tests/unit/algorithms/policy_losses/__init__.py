"""Tests of megarl/algorithms/policy_losses/."""
