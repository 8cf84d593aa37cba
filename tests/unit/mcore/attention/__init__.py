"""Tests of megarl/mcore/attention/."""
