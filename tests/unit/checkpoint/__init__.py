"""Tests of megarl/checkpoint/."""
