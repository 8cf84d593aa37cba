"""Linear layers through oneDNN's inner product: rows independent of their number, gradients, Megatron's layers."""

import functools
import types

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from megarl.mcore.kernels import linear, native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.operator_names import OperatorNames
from tests.helpers.worlds import run_world

MEGATRON = layers.linear_with_grad_accumulation_and_async_allreduce
ROUNDING = {"rtol": 1e-4, "atol": 1e-3}  # of float32 sums of hundreds of terms that cancel
SHAPES = ((64, 32), (48, 20), (512, 96), (96, 512), (33, 7), (1024, 512))


def matrices(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("outer,inner", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_has_the_same_numbers_in_every_matrix(outer, inner, with_bias):
    x, weight, bias = matrices((300, inner), (outer, inner), (outer,))
    bias = bias if with_bias else None
    whole = linear.matmul(x, weight, bias)
    reference = x.double() @ weight.double().t() + (bias if with_bias else 0.0)
    assert_close(whole.double(), reference, **ROUNDING)
    for rows in (*range(MIN_ROWS, 35), *range(35, 131, 7)):
        assert_close(linear.matmul(x[:rows], weight, bias), whole[:rows], rtol=0, atol=largest_gap_allowed())
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(2))[:61]
    assert_close(linear.matmul(x[shuffled], weight, bias), whole[shuffled], rtol=0, atol=largest_gap_allowed())


def test_strides_and_leading_dimensions_do_not_matter():
    x, weight = matrices((40, 96), (64, 96))
    whole = linear.matmul(x, weight)
    assert torch.equal(linear.matmul(x.t().contiguous().t(), weight), whole)
    assert torch.equal(linear.matmul(torch.cat([x, x], 1)[:, :96], weight), whole)
    assert torch.equal(linear.matmul(x, weight.t().contiguous().t()), whole)
    assert torch.equal(linear.matmul(x.view(8, 5, 96), weight), whole.view(8, 5, 64))
    assert linear.matmul(x[:0], weight).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_use_torchs_product(dtype):
    x, weight = matrices((9, 32), (64, 32), dtype=dtype)
    assert torch.equal(linear.matmul(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", linear.HALF)
def test_a_row_of_a_small_product_in_16_bits_has_the_same_bits_in_a_large_one(dtype, monkeypatch):
    """Torch's kernel for small products sums 2²⁵ + 62 − 2²⁵ in another order: 58 in 16 rows, 1 in 17 on an AMD EPYC."""
    sizes, of_torch = [], linear._of_torch
    monkeypatch.setattr(linear, "_of_torch", lambda x, *others: sizes.append(x.shape) or of_torch(x, *others))
    for outer, inner in ((4, 64), (16, 16), (32, 32), (64, 16)):
        x, weight = torch.ones(80, inner, dtype=dtype), torch.ones(outer, inner, dtype=dtype)
        x[:, 0], x[:, -1], weight[:, 0], weight[:, -1] = 2**12, -(2**12), 2**13, 2**13
        whole = linear.matmul(x, weight)
        for rows in (4, 5, 8, 13, 16, 17, 40):
            assert torch.equal(linear.matmul(x[:rows], weight), whole[:rows])
        assert min(rows for rows, _ in sizes) * outer * inner > linear.SMALL_PRODUCT
        sizes.clear()
    x, weight, bias = matrices((2, 3, 8), (4, 8), (4,), dtype=dtype)
    assert_close(linear.matmul(x, weight, bias), of_torch(x, weight, bias))
    assert linear.matmul(x[:0], weight).shape == (0, 3, 4)


def shapes_without_memory(rank):
    """Shapes of products of meta tensors and of fake tensors, in three dtypes.

    Runs in a fork: autograd fails in processes forked after fake tensors were used.
    """
    found = [linear.matmul(torch.empty(9, 32, device="meta"), torch.empty(64, 32, device="meta")).shape]
    with FakeTensorMode() as mode:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x, weight = matrices((9, 32), (64, 32), dtype=dtype)
            found.append(linear.matmul(mode.from_tensor(x), mode.from_tensor(weight)).shape)
        found.append(linear.matmul(torch.empty(3, 3, 32), torch.empty(64, 32)).shape)
    return found


def test_meta_tensors_get_the_results_shape():
    assert run_world(shapes_without_memory, 1) == [[(9, 64)] * 4 + [(3, 3, 64)]]


def test_without_the_operator_torchs_product_is_used(monkeypatch):
    """With neither compiled kernels nor a torch that has the operator."""
    x, weight = matrices((9, 32), (64, 32))
    monkeypatch.setattr(native, "_is_enabled", False)
    monkeypatch.setattr(linear, "_uses_onednn", False)
    monkeypatch.setattr(linear, "_inner_product", None)
    assert torch.equal(linear.matmul(x, weight), torch.nn.functional.linear(x, weight))


def gradients(rank):
    """[(gradients of megarl's linear, of torch's in float64)], for each choice of inputs that want one."""
    found = []
    for wanted in ((True, True, True), (False, True, True), (True, False, False), (True, True, False)):
        x, weight, bias, grad = matrices((6, 2, 32), (64, 32), (64,), (6, 2, 64))
        pair = []
        for function, dtype in ((linear.linear, torch.float32), (torch.nn.functional.linear, torch.float64)):
            inputs = [t.to(dtype, copy=True).requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)]
            function(*inputs).backward(grad.to(dtype))
            pair.append([None if t.grad is None else t.grad.double() for t in inputs])
        found.append((wanted, *pair))
    return found


def test_gradients_equal_torchs_linear():
    for wanted, found, expected in run_world(gradients, 1)[0]:
        assert [grad is not None for grad in found] == list(wanted)
        assert_close(found, expected, **ROUNDING)


def of_layer(function, inputs, grad, kind: str) -> list:
    """Output of a layer on this rank, and the gradients of its inputs if one is given."""
    inputs = [None if t is None else t.clone().requires_grad_(t.requires_grad) for t in inputs]
    with torch.set_grad_enabled(grad is not None):
        out = function(
            *inputs, gradient_accumulation_fusion=False, tp_group=dist.group.WORLD,
            allreduce_dgrad=kind == "column", sequence_parallel=kind == "sequence",
        )  # fmt: skip
    if grad is not None:
        out.backward(grad)
    return [out.detach(), *(None if t is None or grad is None else t.grad for t in inputs)]


def parallel_layers(rank):
    """Of each kind of parallel layer, trained and frozen: results of Megatron's function, of megarl's, in rollout."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # forked ranks inherit that of the test process
        parallel_state._set_global_memory_buffer()
    found = []
    for kind in ("column", "sequence", "row"):
        for frozen in (False, True):
            x, weight, bias, grad = matrices((8, 1, 32), (64, 32), (64,), (8, 1, 64))
            if kind == "row":
                x, weight, bias = x.chunk(2, -1)[rank].contiguous(), weight.chunk(2, -1)[rank].contiguous(), None
            else:
                weight, bias, grad = weight.chunk(2)[rank], bias.chunk(2)[rank], grad.chunk(2, -1)[rank].contiguous()
                x = x.chunk(2)[rank] if kind == "sequence" else x
            inputs = [x.requires_grad_(), weight.requires_grad_(not frozen), bias]
            megatron = layers.linear_with_frozen_weight if frozen else MEGATRON
            megarl = functools.partial(linear.parallel_linear, types.SimpleNamespace(config=None))
            results = [of_layer(megatron, inputs, grad, kind), of_layer(megarl, inputs, grad, kind)]
            found.append((*results, of_layer(megarl, inputs, None, kind)[0]))
    return found


def test_parallel_layers_equal_megatrons():
    for found in run_world(parallel_layers, 2):
        for megatron, megarl, rollout in found:
            assert_close(megarl, megatron, rtol=1e-4, atol=1e-4)
            assert torch.equal(rollout, megarl[0])


def test_megatrons_layers_call_it():
    assert layers.ColumnParallelLinear._forward_impl is linear.parallel_linear
    assert layers.RowParallelLinear._forward_impl is linear.parallel_linear


def held_in_blocks(rank: int) -> list[bool]:
    """For each linear's weight: whether only products inside the context use a prepacked copy, with the same bits."""
    from tests.helpers.models.tiny_models import build

    model, _, _ = build()
    found = []
    weights = [layer.weight for layer in model.modules() if isinstance(layer, layers.RowParallelLinear)]
    xs = [matrices((9, weight.shape[1]))[0] for weight in weights]
    plain = [linear.matmul(x, weight) for x, weight in zip(xs, weights, strict=True)]
    with torch.no_grad(), linear.prepacked_weights(model):
        found += [id(weight) in linear._prepacked for weight in weights]
        found += [torch.equal(linear.matmul(x, w), y) for x, w, y in zip(xs, weights, plain, strict=True)]
    return [*found, not linear._prepacked]


def test_prepacked_weights_give_the_same_bits_and_are_freed():
    (found,) = run_world(held_in_blocks, 1)
    assert len(found) > 3 and all(found) if linear.HAS_INNER_PRODUCT else found[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_sum_of_a_weight_gradient_has_the_bits_of_product_and_sum_on_a_cpu(dtype):
    total, grad, x = matrices((33, 7), (20, 33), (20, 7))
    grad, x = grad.to(dtype), x.to(dtype)
    expected = total + grad.t() @ x
    linear.add_weight_gradient(total, grad, x)
    assert torch.equal(total, expected)


def operators_of_a_sum(rank, dtype, has_wider_sum):
    """Operators of the sum of a weight gradient on CUDA. In a fork: autograd fails in later forks of this process."""
    linear.HAS_WIDER_SUM = has_wider_sum
    with FakeTensorMode(allow_non_fake_inputs=True), OperatorNames() as operators:
        empty, place = torch.ops.aten.empty.memory_format, torch.device("cuda", 0)
        total = empty((33, 7), device=place, dtype=torch.float32)
        grad, x = (empty(shape, device=place, dtype=dtype) for shape in ((20, 33), (20, 7)))
        operators.names.clear()
        linear.add_weight_gradient(total, grad, x)
    return [name for name in operators.names if name.startswith("aten.")]


@pytest.mark.parametrize(("dtype", "has_wider_sum", "expected"), [
    (torch.bfloat16, True, ["aten.t.default", "aten.addmm.dtype_out"]),
    (torch.float16, True, ["aten.t.default", "aten.addmm.dtype_out"]),
    (torch.bfloat16, False, ["aten.t.default", "aten.mm.default", "aten.add_.Tensor"]),
    (torch.float32, True, ["aten.t.default", "aten.addmm_.default"]),
])  # fmt: skip
def test_on_cuda_a_wider_sum_has_no_product_of_its_own(dtype, has_wider_sum, expected):
    assert linear.HAS_WIDER_SUM
    assert run_world(operators_of_a_sum, 1, dtype, has_wider_sum) == [expected]


def sums_of_layers(rank, dtype, sum_dtype, marks: dict):
    """Of megarl's linear layer and of Megatron's, as on CUDA: the sum in Megatron's buffer after two micro-batches, the
    gradient that is left for its hooks, and whether they add it; the last two micro-batches' gradients in fp32."""

    def add(total, grad, x):
        total.add_(grad.float().t() @ x.float())

    linear._has_wide_product = lambda x: x.dtype.itemsize == 2
    linear.add_weight_gradient = add
    linear.install()
    implementation = linear._on_cuda(lambda layer, *args, **options: MEGATRON(*args, **options))
    options = {"tp_group": dist.group.WORLD, "allreduce_dgrad": False, "sequence_parallel": False}
    layer, found = types.SimpleNamespace(config=None), []
    for multiply in (linear.linear, lambda x, w: implementation(layer, x, w, None, False, **options)):
        weight, expected = torch.nn.Parameter(matrices((33, 7))[0].to(dtype)), torch.zeros(33, 7)
        if sum_dtype is not None:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(33, 7, dtype=sum_dtype), False
        vars(weight).update(marks)
        for seed in (1, 2):
            x, grad = (t.to(dtype) for t in matrices((20 * seed, 7), (20 * seed, 33)))
            weight.grad = None
            multiply(x.requires_grad_(), weight).backward(grad)
            expected += grad.float().t() @ x.detach().float()
        total = getattr(weight, "main_grad", torch.zeros(33, 7))
        assert weight.grad.shape == weight.shape and weight.grad.dtype is dtype  # hooks want one
        found.append(
            (torch.equal(total, expected), bool(total.any()), getattr(weight, "grad_added_to_main_grad", None))
        )
    return found


@pytest.mark.parametrize(("dtype", "sum_dtype", "marks", "adds"), [
    (torch.bfloat16, torch.float32, {}, True),
    (torch.float16, torch.float32, {}, True),
    (torch.bfloat16, torch.bfloat16, {}, False),  # a sum of 16 bits is no more precise
    (torch.float32, torch.float32, {}, False),
    (torch.bfloat16, None, {}, None),  # FSDP, or a model that is not wrapped
    (torch.bfloat16, torch.float32, {"shared_embedding": True}, False),
])  # fmt: skip
def test_weight_gradients_in_16_bits_are_added_in_fp32_by_the_product(dtype, sum_dtype, marks, adds):
    assert run_world(sums_of_layers, 1, dtype, sum_dtype, marks) == [[(bool(adds), bool(adds), adds)] * 2]
