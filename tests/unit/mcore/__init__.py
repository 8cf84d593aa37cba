"""Tests of megarl/mcore/."""
