"""Tests of megarl/environments/sessions."""
