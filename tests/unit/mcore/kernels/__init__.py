"""Tests of megarl/mcore/kernels/."""
