"""What megarl sets, and what Megatron sets, in a role's namespace: values that do not run are refused there, too."""

import pytest

from megarl.arguments import parse
from megarl.mcore.config import megatron_flags
from tests.helpers.texts.refusals import refusal

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8"
OWN = {"train_iters": 10, "seed": 1, "seq_length": 48, "draws_weights": True}


def line_of(flags: str, extra: frozenset[str] = frozenset()) -> str:
    """The line that refuses a role's flags."""
    return refusal(megatron_flags.parse, "actor", f"{SHAPE} {EXPERTS} {flags}".split(), 1, OWN, extra)


@pytest.mark.parametrize(
    ("name", "value"), [("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")]
)
def test_a_value_that_megatron_sets_is_checked_too(name, value):
    line = line_of(f"--{name.replace('_', '-')}", frozenset([name]))
    assert line.startswith(f"actor: --cuda-graph-impl {value}, which Megatron sets for these flags: CUDA graphs")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_dispatchers_by_collectives_pass(dispatcher):
    lengths = "--max-prompt-length 5 --max-response-length 6"
    argv = f"{SHAPE} {lengths} {EXPERTS} --moe-token-dispatcher-type {dispatcher}".split()
    assert parse(argv, 1, "sft").roles["actor"].megatron.moe_token_dispatcher_type == dispatcher
