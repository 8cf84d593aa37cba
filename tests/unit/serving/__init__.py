"""Tests of megarl.serving."""
