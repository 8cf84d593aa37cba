"""Tests of megarl/algorithms/."""
