"""Tests of megarl/mcore/model/layer_specs/."""
