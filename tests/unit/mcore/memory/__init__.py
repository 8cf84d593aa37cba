"""Tests of megarl/mcore/memory/."""
