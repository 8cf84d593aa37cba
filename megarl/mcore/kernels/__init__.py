"""Compute kernels: linear layers, norms, SwiGLU, and vocabulary-parallel log-probabilities."""
