"""Tests of megarl/mcore/parallel/."""
