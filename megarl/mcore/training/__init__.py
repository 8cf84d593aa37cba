"""Training: optimizer, gradient buffers and learning-rate schedule of a role."""
