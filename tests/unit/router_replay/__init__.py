"""Tests of megarl/router_replay/."""
