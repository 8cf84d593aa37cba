"""Tests of single modules; folders mirror the packages of megarl/."""
