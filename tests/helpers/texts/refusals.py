"""What is said of wrong input."""

from collections.abc import Callable

import pytest

from megarl.errors import UsageError


def refusal(function: Callable, *args, **named) -> str:
    """The line with which a call is refused."""
    with pytest.raises(UsageError) as caught:
        function(*args, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
