"""Tests of megarl/environments/agents."""
