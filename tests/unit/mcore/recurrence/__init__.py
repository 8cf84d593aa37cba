"""Tests of megarl/mcore/recurrence/."""
