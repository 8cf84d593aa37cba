"""Experts of several ranks on equally many rows of each: the bits of the exchange by numbers of rows."""

import os

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.moe import equal_rows
from tests.helpers.models.layouts import CP2, EP2, SP, TP2
from tests.helpers.models.tiny_models import build
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

EP4 = "--expert-model-parallel-size 4"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate"


def layer_of(flags: str):
    model, _, _ = build(f"--num-experts 8 --moe-ffn-hidden-size 32 {flags}")
    return model.decoder.layers[1].mlp


def outputs(rank, flags: str, is_grouped: bool):
    """[(output of a step, of `forward`, numbers that the host read in the step)] for several numbers of rows."""
    layer, found = layer_of(flags).eval(), []
    layer.is_grouped = is_grouped
    real, reads = torch.Tensor.tolist, []
    torch.Tensor.tolist = lambda self: reads.append(1) or real(self)  # type: ignore[method-assign]
    for rows in (1, 4, 37):  # of a single row, most experts have none
        hidden = torch.randn(rows, 1, 64, generator=torch.Generator().manual_seed(rank))
        hidden = hidden.to(layer.config.params_dtype)
        with torch.inference_mode():
            by_numbers, _ = layer(hidden)
            reads.clear()
            step, _ = layer.step(hidden)
        found.append((step, by_numbers, len(reads)))
    return found


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("size, flags", [
    (2, f"--moe-router-topk 3 {EP2} {SHARED}"),
    (2, f"--moe-router-topk 5 {EP2} --moe-router-dtype fp64"),  # more than a rank has experts; 5 · 8 bytes of gates
    long((4, f"--moe-router-topk 1 --moe-router-pre-softmax {EP4}")),
    long((4, f"--moe-router-topk 2 {TP2} {EP4} {SP}")),
])  # fmt: skip
def test_a_step_has_the_bits_of_the_exchange_by_numbers(size, flags, is_grouped):
    for dtype in ("--bf16",) if is_grouped else ("", "--bf16", "--bf16 --moe-router-dtype fp32"):
        for of_rank in run_world(outputs, size, f"{flags} {dtype}", is_grouped):
            for step, by_numbers, reads in of_rank:
                assert torch.equal(step, by_numbers) and step.abs().max() > 0
                assert reads == (0 if is_grouped else 1)


def limits(rank, flags: str, ranks_of_node: int = 2):
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_node)
    return layer_of(f"--moe-router-topk 2 {flags}").max_equal_rows


def test_the_messages_bound_the_rows():
    """Two ranks, two experts a row, 64 channels of four bytes."""
    assert run_world(limits, 2, EP2) == [equal_rows.MAX_BYTES // (2 * 2 * 64 * 4)] * 2
    assert run_world(limits, 2, EP2, 1) == [equal_rows.MAX_BYTES_BETWEEN_NODES // (2 * 2 * 64 * 4)] * 2


@pytest.mark.parametrize("flags", ["--glu-linear-offset 1", f"{CP2} --moe-token-dispatcher-type allgather"])
def test_layers_on_megatrons_path_have_no_such_step(flags):
    assert run_world(limits, 2, f"{EP2} {flags}") == [0, 0]


def messages(rank):
    """What all ranks sent, by field: of several widths, none of which fills whole words."""
    fields = [torch.full((2, 3), rank, dtype=kind) for kind in (torch.bfloat16, torch.float64, torch.int32)]
    return equal_rows._gather(fields, dist.group.WORLD)


def test_one_message_has_fields_of_several_types():
    for of_rank in run_world(messages, 2):
        for field, kind in zip(of_rank, (torch.bfloat16, torch.float64, torch.int32), strict=True):
            assert field.dtype is kind and field.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
