"""Environments, agents and judges of small runs, and odd ones."""
