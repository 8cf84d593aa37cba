"""Tests of megarl/flags/."""
