"""Tests of megarl/mcore/moe/."""
