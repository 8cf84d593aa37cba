"""Tests of megarl/mcore/kernels/native/."""
