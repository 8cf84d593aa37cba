"""Tests of megarl: `unit/` mirrors its packages; tests share `helpers/` and compare with `references/`."""
