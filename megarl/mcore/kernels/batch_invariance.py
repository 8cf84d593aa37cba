"""Sizes that make CPU kernels batch-invariant: a token's results do not depend on the rest of the batch.

This makes rollout and training equal to the last bit (docs/exactness.md). Matrix products of fewer than `MIN_ROWS` rows
use another BLAS kernel; a softmax row that does not fill whole vectors of `VECTOR` elements is summed in another order.
Extra rows and keys are padding; their results are dropped.
"""

MIN_ROWS = 4
VECTOR = 16
