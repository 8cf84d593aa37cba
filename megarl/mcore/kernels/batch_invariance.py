"""What makes kernels batch-invariant: a token's results do not depend on the rest of the batch.

This makes rollout and training equal to the last bit (docs/exactness.md). On a CPU sizes suffice: matrix products of
fewer than `MIN_ROWS` rows use another BLAS kernel; a softmax row that does not fill whole vectors of `VECTOR` elements
is summed in another order. Extra rows and keys are padding; their results are dropped. On CUDA it takes other kernels
(`kernels.cuda`), which a model of an exact rollout uses.
"""

MIN_ROWS = 4
VECTOR = 16


def is_exact(config) -> bool:
    """Whether a model with this config uses the kernels of `--exact-rollout` on CUDA in its forward passes."""
    return getattr(config, "exact_rollout", False)
