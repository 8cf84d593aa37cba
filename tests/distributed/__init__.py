"""Tests of parallel layouts: several ranks do what one rank does."""
