"""Tests of megarl/planning/."""
