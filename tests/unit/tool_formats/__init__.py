"""Tests of megarl/tool_formats/."""
