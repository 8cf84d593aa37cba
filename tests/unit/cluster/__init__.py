"""Tests of megarl.cluster."""
