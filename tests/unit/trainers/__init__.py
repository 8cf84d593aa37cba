"""Tests of megarl/trainers/."""
