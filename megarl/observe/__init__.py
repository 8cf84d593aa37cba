"""What a run leaves behind: metrics, progress lines, timings, trace, samples, settings and the report."""
