"""What is said of wrong input."""

from collections.abc import Callable

import pytest

from megarl.errors import UsageError


def refusal(function: Callable, *args, **named) -> str:
    """The line with which a call is refused."""
    with pytest.raises(UsageError) as caught:
        function(*args, **named)
    message = str(caught.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message
