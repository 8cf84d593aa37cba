"""Tests of megarl/cluster/."""
