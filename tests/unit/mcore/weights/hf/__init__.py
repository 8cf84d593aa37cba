"""Tests of megarl/mcore/config/."""
