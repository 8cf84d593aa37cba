"""Tests of megarl.environments."""
