"""Tests of megarl/mcore/inference/."""
