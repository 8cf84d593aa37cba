"""Sizes that make kernels batch-invariant on a CPU: a token's numbers do not depend on what it is batched with.

That is why rollout and training agree to the last bit (docs/exactness.md). Matrix products of fewer rows than `MIN_ROWS`
take another BLAS kernel; a softmax row that does not fill whole vectors of `VECTOR` elements is summed in another order.
Rows and keys beyond the real ones are padding that nobody reads.
"""

MIN_ROWS = 4
VECTOR = 16
