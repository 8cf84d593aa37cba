"""What is said of wrong input."""

from collections.abc import Callable

import pytest

from megarl.errors import UsageError

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8"
SHAPE = f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 {EXPERTS}"


def refusal(function: Callable, *args, **named) -> str:
    """The line with which a call is refused."""
    with pytest.raises(UsageError) as caught:
        function(*args, **named)
    message = str(caught.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


def refused_role(flags: str, extra: frozenset[str] = frozenset()) -> str:
    """The line that refuses Megatron's flags of a role with experts."""
    from megarl.mcore.config import megatron_flags

    own = {"train_iters": 10, "seed": 1, "seq_length": 48, "draws_weights": True}
    return refusal(megatron_flags.parse, "actor", f"{SHAPE} {flags}".split(), 1, own, extra)
