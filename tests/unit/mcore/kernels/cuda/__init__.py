"""Tests of megarl/mcore/kernels/cuda/."""
