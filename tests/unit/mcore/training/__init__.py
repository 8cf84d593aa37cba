"""Tests of megarl/mcore/training/."""
