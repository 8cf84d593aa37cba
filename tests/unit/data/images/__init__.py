"""Tests of megarl/data/images/."""
