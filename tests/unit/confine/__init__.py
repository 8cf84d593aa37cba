"""Tests of megarl/confine/."""
