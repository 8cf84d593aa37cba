"""Tests of tests/helpers/."""
