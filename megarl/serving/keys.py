"""Keys of random streams in plain integers: the same as those of `megarl.algorithms.counter_rng`, without torch."""

import secrets

SERVE_STEP = 2**31 + 1  # the step number of all requests; no training step is as large

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def _splitmix64(state: int) -> int:
    z = state & _MASK
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, prompt: int, choice: int) -> int:
    """The signed 64-bit key of the random stream of one choice for one prompt of a request with this seed.

    It equals `counter_rng.stream_keys(seed, SERVE_STEP, prompt, choice)`.
    """
    key = _splitmix64(seed + _GOLDEN_GAMMA)
    for counter in (SERVE_STEP, prompt, choice):
        key = _splitmix64((key ^ (counter & _MASK)) + _GOLDEN_GAMMA)
    return key - 2**64 if key >> 63 else key


def random_seed() -> int:
    """A seed that no client can guess, for requests without one: 0 up to 2**63 - 1."""
    return secrets.randbits(63)
