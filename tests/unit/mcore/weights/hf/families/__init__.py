"""Tests of megarl/mcore/weights/hf/families/."""
