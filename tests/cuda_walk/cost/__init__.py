"""Predicts the time of a run's phases on an H100, from walks of the real shapes: `python -m tests.cuda_walk.cost`."""
