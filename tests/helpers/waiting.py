"""Waiting for what should happen, without a limit that a slow or busy machine could meet. Imports no torch."""

import time

# When to give up what should have ended: so late that no slow or busy machine gets there. For all tests.
SAFETY_SECONDS = 600.0


def wait_until(condition) -> bool:
    """Looks again and again until `condition()` holds; False when it still does not after SAFETY_SECONDS."""
    deadline = time.monotonic() + SAFETY_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True
