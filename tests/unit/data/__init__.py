"""Tests of megarl/data/."""
