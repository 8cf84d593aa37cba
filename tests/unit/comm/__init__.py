"""Tests of megarl/comm/."""
