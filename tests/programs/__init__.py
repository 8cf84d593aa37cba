"""Tests of the programs: whole small runs, started as users start them."""
