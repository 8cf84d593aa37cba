"""Tests of megarl.faults."""
