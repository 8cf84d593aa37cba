"""Weights of grouped experts in Megatron's buffers: a view of the buffer is their stack, wherever buckets end."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.helpers.gradient_accumulation import accumulate
from tests.helpers.lora_models import trainable
from tests.helpers.tiers import long
from tests.helpers.tiny_models import build_stages
from tests.helpers.worlds import run_world

# 32 · 64 · 3 weights an expert: with three replicas no multiple of the 384 that ends of buckets are padded to.
EXPERTS = "--bf16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm"
DISTRIBUTED = "--use-distributed-optimizer"
SMALL_BUCKETS = f"{DISTRIBUTED} --overlap-grad-reduce --ddp-bucket-size 7000"  # they end within a layer's experts
LORA = "--lora-rank 4 --lora-targets q_proj"


def weights_of(stages) -> list[list[torch.nn.Parameter]]:
    """The first and the second weights of the experts of each layer, by expert."""
    lists = [layer.mlp.experts.local_experts for layer in stages[0].decoder.layers]
    return [[getattr(module_list[i], name).weight for i in range(len(module_list))]
            for module_list in lists for name in ("linear_fc1", "linear_fc2")]  # fmt: skip


def are_views(stages, attribute: str = "data") -> bool:
    from megarl.mcore.kernels.swiglu import stack_of

    found = []
    for weights in weights_of(stages):
        tensors = [getattr(weight, attribute) for weight in weights]
        stack = stack_of(tensors)
        assert torch.equal(stack, torch.stack(tensors))
        found.append(stack.data_ptr() == tensors[0].data_ptr())
    return all(found)


def layout(rank: int, flags: str):
    """Whether weights, gradients and weights that came back from the host are views of their buffers; names, buckets
    that end within a layer's experts, and gradients."""
    from megarl.mcore.memory import offload
    from megarl.mcore.moe import layer

    layer.device = SimpleNamespace(has_cuda=lambda: True)
    model, place = trainable(f"{EXPERTS} {flags}")
    stages, wrapped, adam = model.model, model.wrapped, model.optimizer
    names = [name for name, _ in stages[0].named_parameters()]
    views = [are_views(stages)]
    if LORA not in flags:
        views.append(are_views(stages, "main_grad"))
    accumulate(wrapped, adam, place, parts=2 if dist.get_world_size() == 1 else 1)
    if LORA not in flags:  # one sum for all experts
        views += [weight.grad_added_to_main_grad for weights in weights_of(stages) for weight in weights]
    gradients = {n: p.main_grad.clone() for n, p in stages[0].named_parameters() if p.requires_grad}
    ends = {wrapped[0].param_to_bucket_group[w] for weights in weights_of(stages)[:2] for w in weights
            if w.requires_grad}  # fmt: skip
    moved = offload.offload_trainable(stages, wrapped, adam)
    with moved.present("weights"):
        views.append(are_views(stages))
    return views, names, len(ends), gradients


@pytest.mark.parametrize(("size", "flags"), [
    long((1, "")),
    long((1, DISTRIBUTED)),
    (3, SMALL_BUCKETS),
    long((1, LORA)),
    long((2, SMALL_BUCKETS)),
    long((2, f"{DISTRIBUTED} --expert-model-parallel-size 2")),
])  # fmt: skip
def test_stacks_are_views_of_the_buffers(size, flags):
    for views, names, buckets, _ in run_world(layout, size, flags):
        assert all(views) and buckets >= (2 if flags == SMALL_BUCKETS else 0)
        experts = [name.split(".")[-3] for name in names if "local_experts" in name and "linear_fc1" in name]
        assert experts == list("01" if "expert-model" in flags else "0123") * 2


def without_views(rank: int, flags: str):
    """As `layout`, but weights are copied and gradients added one after another."""
    from megarl.mcore.kernels import swiglu

    swiglu.view_of = lambda weights: None
    return layout(rank, flags)


def test_the_layout_changes_no_gradient():
    (_, names, _, plain), (_, others, _, distributed) = (run_world(layout, 1, flags)[0] for flags in ("", DISTRIBUTED))
    ((views, _, _, copied),) = run_world(without_views, 1, DISTRIBUTED)
    assert not any(views) and names == others and plain.keys() == distributed.keys() == copied.keys()
    assert all(torch.equal(plain[name], distributed[name]) for name in plain)
    assert all(torch.equal(plain[name], copied[name]) for name in plain)


def frozen(rank: int) -> list[bool]:
    """Whether the weights of a model that only scores are views, at first and when they came back from the host."""
    from megarl.mcore.memory import offload
    from megarl.mcore.moe import layer

    layer.device = SimpleNamespace(has_cuda=lambda: True)
    stages, _, _ = build_stages(EXPERTS)
    found = [are_views(stages)]
    with offload.offload_frozen(stages).present("weights"):
        return [*found, are_views(stages)]


def test_stacks_of_a_frozen_model_are_views():
    assert run_world(frozen, 1) == [[True, True]]
