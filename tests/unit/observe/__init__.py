"""Tests of megarl/observe/."""
