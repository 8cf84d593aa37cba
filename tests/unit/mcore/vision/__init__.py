"""Tests of what a model reads of images."""
