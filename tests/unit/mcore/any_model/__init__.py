"""Tests of megarl/mcore/any_model/."""
