"""Outputs of a run: metrics, progress lines, timings, trace, samples, settings and the report."""
