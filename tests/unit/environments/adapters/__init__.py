"""Tests of megarl.environments.adapters."""
