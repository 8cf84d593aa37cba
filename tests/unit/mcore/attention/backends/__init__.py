"""Tests of megarl/mcore/attention/backends/."""
