"""Tests of megarl/mcore/model/."""
