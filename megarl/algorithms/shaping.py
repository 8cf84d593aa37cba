"""Penalties added to a response's score before the advantages are computed."""

from megarl.deferred import Tensor


def overlong_penalty(response_lengths: Tensor, limit: int | Tensor, buffer: int) -> Tensor:
    """0 up to limit − buffer tokens, then falling linearly to −1 at the limit, −1 beyond.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), with L_max = limit and L_cache = buffer.

    Args:
        response_lengths: [N] response tokens.
        limit: tokens from which on the penalty is −1; of all responses, or [N] of each.
        buffer: tokens before the limit over which the penalty grows, 1 … limit.

    Returns:
        [N] float32 in [−1, 0].

    Raises:
        ValueError: the buffer is outside 1 … limit.
    """
    least = limit if isinstance(limit, int) else min(limit.tolist(), default=buffer)
    if not 1 <= buffer <= least:
        raise ValueError(f"overlong buffer must be in [1, limit {least}], got {buffer}")
    return ((limit - buffer - response_lengths).double() / buffer).clamp(-1, 0).float()
