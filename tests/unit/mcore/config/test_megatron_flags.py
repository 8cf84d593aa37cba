"""What megarl sets, and what Megatron sets, in a role's namespace: values that do not run are refused there, too."""

import pytest

from megarl.arguments import parse
from tests.helpers.texts.refusals import SHAPE, refused_role


@pytest.mark.parametrize(
    ("name", "value"), [("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")]
)
def test_a_value_that_megatron_sets_is_checked_too(name, value):
    line = refused_role(f"--{name.replace('_', '-')}", frozenset([name]))
    assert line.startswith(f"actor: --cuda-graph-impl {value}, which Megatron sets for these flags: CUDA graphs")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_dispatchers_by_collectives_pass(dispatcher):
    lengths = "--max-prompt-length 5 --max-response-length 6"
    argv = f"{SHAPE} {lengths} --moe-token-dispatcher-type {dispatcher}".split()
    assert parse(argv, 1, "sft").roles["actor"].megatron.moe_token_dispatcher_type == dispatcher
