"""Tests of megarl/roles/."""
