"""The direct path of the MoE layer: the bits of Megatron's, fewer operators; weights of grouped experts are stacks."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.mcore import offload
from megarl.mcore.kernels import native, swiglu
from megarl.mcore.kernels.linear import HAS_INNER_PRODUCT
from megarl.mcore.kernels.swiglu import stack_of
from tests.helpers.models.gradient_accumulation import accumulate
from tests.helpers.models.lora_models import trainable
from tests.helpers.models.operator_names import OperatorNames
from tests.helpers.models.tiny_models import build, build_stages
from tests.helpers.tiers import long
from tests.helpers.worlds import on_each_rank, run_world

MOE = "--num-experts 8 --moe-ffn-hidden-size 32"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe"
EP2, TP2, SP = "--expert-model-parallel-size 2", "--tensor-model-parallel-size 2", "--sequence-parallel"


def layer_of(flags: str):
    model, _, _ = build(f"{MOE} {flags}")
    return model.decoder.layers[1].mlp


def hidden_states(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 1, 64, generator=torch.Generator().manual_seed(seed))


def both_paths(rank, flags: str, is_compiled: bool):
    """For several numbers of tokens: (output, that without gradients, gradients) of the direct and Megatron's path.
    `is_compiled`: with megarl's kernels, whose SwiGLU has another exp than Megatron's path."""
    native.enable(is_compiled)
    layer, found = layer_of(flags), []
    layer.eval()  # without the losses of a mini-batch; recomputation needs training mode
    layer.router.train(False)
    for rows in (1, 5, 40):
        rows += dist.get_rank() * 3 * (SP not in flags)  # replicas hold unequally many tokens
        results = []
        for layer._is_direct in (True, False):
            hidden = hidden_states(rows, rank).requires_grad_()
            layer.zero_grad()
            layer.moe_layer_recompute = SELECTIVE in flags
            layer.training = SELECTIVE in flags
            output, _ = layer(hidden)
            (output * hidden_states(rows, 9)).sum().backward()
            gradients = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"": hidden.grad}
            with torch.no_grad():
                plain, _ = layer(hidden)
            results.append((output.detach(), plain, gradients))
        found.append(results)
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("size, flags", [
    long((1, "--moe-router-topk 2")),
    (1, f"--moe-router-topk 3 {SHARED}"),
    (1, "--moe-router-topk 1 --moe-router-pre-softmax"),
    (1, f"--moe-router-topk 2 {SELECTIVE}"),
    (2, f"--moe-router-topk 3 {EP2} {SHARED}"),
    long((2, f"--moe-router-topk 2 {TP2} {EP2} {SP}")),
    long((2, f"--moe-router-topk 2 {EP2} {SELECTIVE}")),
])  # fmt: skip
def test_the_direct_path_has_the_results_of_megatrons(size, flags, is_compiled):
    """Experts without rows and with fewer than `MIN_ROWS` included; gradients are sums in another order."""
    for of_rank in run_world(both_paths, size, flags, is_compiled):
        for (output, plain, gradients), (expected, _, expected_gradients) in of_rank:
            assert torch.equal(output, plain) and output.abs().max() > 0
            allowed = 1e-6 * float(expected.abs().max()) if is_compiled else 0.0
            torch.testing.assert_close(output, expected, rtol=0, atol=allowed)
            assert gradients.keys() == expected_gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("topk", [1, 2, 5])
@on_each_rank()
def test_a_token_does_not_depend_on_the_others(rank, topk):
    """Its output has the same bits with all others and in a batch with any number of them."""
    layer = layer_of(f"--moe-router-topk {topk} --moe-router-pre-softmax {SHARED}").eval()
    with torch.no_grad():
        whole, _ = layer(hidden := hidden_states(60))
        for rows in [*(slice(i, i + 4) for i in range(57)), *(slice(i) for i in range(4, 60))]:
            assert torch.equal(layer(hidden[rows])[0], whole[rows])


@pytest.mark.long
def test_nor_where_blas_sums_by_the_number_of_rows():
    """MKL's kernels for any processor do, and so do those for some: rollout and training then had other gates."""
    if not HAS_INNER_PRODUCT:
        pytest.skip("this torch multiplies with BLAS alone")
    test = f"{__file__}::{test_a_token_does_not_depend_on_the_others.__name__}[2]"
    settings = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@on_each_rank()
def test_the_direct_path_has_half_the_operators(rank):
    layer, hidden, found = layer_of("--moe-router-topk 2").eval(), hidden_states(16), []
    for layer._is_direct in (True, False):
        with torch.inference_mode(), OperatorNames() as operators:
            layer(hidden)
        found.append(len(operators.names))
    direct, dispatched = found
    assert 2 * direct <= dispatched, (direct, dispatched)


@pytest.mark.parametrize("flags, is_direct", [
    ("", True), ("--glu-linear-offset 1", False), (EP2, True),
    (f"{EP2} --context-parallel-size 2 --moe-token-dispatcher-type allgather", False),
])  # fmt: skip
@on_each_rank(2)
def test_experts_that_are_no_plain_swiglu_take_megatrons_path(rank, flags, is_direct):
    assert layer_of(f"--moe-router-topk 2 {flags}")._is_direct == is_direct


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
    swiglu.view_of = lambda weights: None
    return layout(rank, flags)


def test_the_layout_changes_no_gradient():
    (_, names, _, plain), (_, others, _, distributed) = (run_world(layout, 1, flags)[0] for flags in ("", DISTRIBUTED))
    ((views, _, _, copied),) = run_world(without_views, 1, DISTRIBUTED)
    assert not any(views) and names == others and plain.keys() == distributed.keys() == copied.keys()
    assert all(torch.equal(plain[name], distributed[name]) for name in plain)
    assert all(torch.equal(plain[name], copied[name]) for name in plain)


@on_each_rank()
def test_stacks_of_a_frozen_model_are_views(rank: int):
    """At first, and when they came back from the host."""
    from megarl.mcore.moe import layer

    layer.device = SimpleNamespace(has_cuda=lambda: True)
    stages, _, _ = build_stages(EXPERTS)
    assert are_views(stages)
    with offload.offload_frozen(stages).present("weights"):
        assert are_views(stages)
