"""Sizes that calls on a CUDA device are rounded up to: few shapes mean few CUDA graphs, and memory that fits again."""

BUCKETS = (4, 8, 16, 32, 64)  # rows; above, multiples of the last one


def bucket_of(rows: int, multiple: int = 1) -> int:
    """The least bucket of at least so many rows; a multiple of `multiple`, the ranks that split the rows."""
    last = BUCKETS[-1]
    size = -(-rows // last) * last if rows > last else next(bucket for bucket in BUCKETS if bucket >= rows)
    return -(-size // multiple) * multiple
