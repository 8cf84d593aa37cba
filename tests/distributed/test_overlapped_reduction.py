"""Gradient reduction during backward: when it is on, that it overlaps, and that it changes no bit."""

import pytest
import torch

from megarl.arguments import parse
from megarl.flags.command_line import config_tokens, read_config_files
from tests.helpers.models.gradient_accumulation import accumulate, wrapped_model
from tests.helpers.models.tiny_models import SHAPES
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
OFF, FSDP = "--no-overlap-grad-reduce", "--use-torch-fsdp2 --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"  # with so few tokens some of them rest
CASES = {
    "dense": (2, "--clip-grad 0.05"),
    "distributed optimizer": (2, "--use-distributed-optimizer --clip-grad 0"),  # a norm is summed shard by shard
    "experts": (2, EXPERTS),
    "two models": (4, TP2),
}


@pytest.mark.parametrize("ranks, flags, expected", [
    (1, "", False), (2, "", True), (2, TP2, False), (4, TP2, True), (2, CP2, True), (2, FSDP, False), (2, OFF, False),
    (1, "--overlap-grad-reduce", True), (2, "--actor-no-overlap-grad-reduce", False),
])  # fmt: skip
def test_overlap_is_on_if_ranks_reduce_gradients(ranks, flags, expected):
    roles = parse(f"{SHAPES['llama']} {flags}".split(), ranks).roles
    assert roles["actor"].megatron.overlap_grad_reduce is expected
    if "actor-" in flags:
        assert roles["critic"].megatron.overlap_grad_reduce


@pytest.mark.parametrize("value, expected", [("true", True), ("false", False), ("null", True)])
def test_config_files_turn_overlap_off_and_on(value, expected, tmp_path):
    for name, text in (("first", "overlap-grad-reduce: false"), ("second", f"overlap-grad-reduce: {value}")):
        (tmp_path / name).write_text(text)
    values = read_config_files([str(tmp_path / "first"), str(tmp_path / "second")])
    tokens = config_tokens(values, {}, lambda key: False)
    assert parse([*SHAPES["llama"].split(), *tokens], 2).roles["actor"].megatron.overlap_grad_reduce is expected


def updated(rank: int, flags: str):
    """Two updates of three micro-batches: (reductions under way when backward ends; buckets; gradients; weights).

    In the first one Megatron counts how often each weight is used, and reduces after backward.
    """
    from megarl.mcore.training import optimizer

    model, wrapped, adam, _, place = wrapped_model(f"--lr 0.05 {flags}")
    groups = [*wrapped[0].bucket_groups, *wrapped[0].expert_parallel_bucket_groups]
    config, under_way = wrapped[0].config, []
    finish = config.finalize_model_grads_func

    def finalize(models, *args, **kwargs):
        under_way.append(sum(group.grad_reduce_handle is not None for group in groups))
        finish(models, *args, **kwargs)

    config.finalize_model_grads_func = finalize
    for _ in range(2):
        accumulate(wrapped, adam, place, 3)
        gradients = [p.main_grad.clone() for p in model.parameters()]
        assert optimizer.update(adam)[0]
    return under_way, len(groups), gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("case", by_default(CASES, ("distributed optimizer", "experts")))
def test_reductions_overlap_backward_and_change_no_bit(case):
    size, flags = CASES[case]
    with_it = run_world(updated, size, f"{flags} --ddp-bucket-size 5000")
    for (early, count, *found), (late, _, *expected) in zip(
        with_it, run_world(updated, size, f"{flags} {OFF}"), strict=True
    ):
        assert early == [0, count] and count > 3 and late == [0, 0]
        gradients, weights = ([torch.equal(a, b) for a, b in zip(*pair)] for pair in zip(found, expected))
        assert all(weights) and (all(gradients) or "distributed" in flags)  # of which a rank has its shards alone
