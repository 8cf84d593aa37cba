"""Tests of megarl: `worlds.py` runs functions on worlds of ranks, `references/` holds what they compare with."""
