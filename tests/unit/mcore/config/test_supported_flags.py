"""Flags and values that megarl does not run end in one line that names them."""

import argparse

import pytest

from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config import megatron_flags
from megarl.mcore.config.supported_flags import ONLY
from tests.helpers.texts.refusals import refused_role

UNUSED = [
    "--enable-cuda-graph", "--external-cuda-graph", "--flash-decode", "--cp-comm-type p2p",
    "--flash-attention-version 3", "--cross-entropy-loss-fusion", "--use-te-activation-func",
    "--use-transformer-engine-op-fuser", "--cpu-offloading-num-layers 2", "--disable-bf16-reduced-precision-matmul",
]  # fmt: skip
ONE_VALUE = [
    "--qk-l2-norm", "--cuda-graph-impl local", "--cuda-graph-impl transformer_engine", "--batch-invariant-mode",
    "--moe-enable-deepep", "--moe-token-dispatcher-type flex",
    "--moe-token-dispatcher-type flex --moe-enable-deepep --bf16",
]  # fmt: skip
FAMILIES = ("--inference-", "--cuda-graph-modules", "--fp8-margin", "--tp-comm-", "--megatron-fsdp-")
OF_FAMILIES = [option for option in megatron_flags.destinations() if option.startswith(FAMILIES)]


@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.parametrize("flags", UNUSED)
def test_flags_without_effect_are_refused_on_every_device(flags, has_cuda, monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: has_cuda)
    flag = flags.split()[0]
    assert refused_role(flags) == f"actor: {flag} is a Megatron flag that megarl does not use; remove it"


@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.parametrize("flags", ONE_VALUE)
def test_values_that_do_not_run_are_refused_on_every_device(flags, has_cuda, monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: has_cuda)
    line = refused_role(flags)
    assert line.startswith(f"actor: {flags.split()[0]} ") and "allowed: " in line and "\n" not in line


def test_flags_of_parts_that_megarl_does_not_have_are_refused():
    assert len(OF_FAMILIES) > 20
    for option in OF_FAMILIES:
        assert refused_role(option) == f"actor: {option} is a Megatron flag that megarl does not use; remove it"


@pytest.mark.parametrize("dest", ONLY)
def test_every_value_that_is_not_allowed_has_a_flag_to_name(dest):
    with pytest.raises(UsageError, match="^actor: --"):
        megatron_flags._check_only("actor", argparse.Namespace(**{dest: "another value"}))
