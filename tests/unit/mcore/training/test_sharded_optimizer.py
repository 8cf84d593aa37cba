"""Muon (`--optimizer muon`): one update against the algorithm in float64, in every layout; what it leaves to Adam."""

import functools
import importlib.util
import itertools

import pytest
import torch
from torch import Tensor

from tests.helpers.models.gradient_accumulation import accumulate, wrapped_model
from tests.helpers.models.tiny_models import gather_parameters
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None,
    reason="emerging-optimizers is not installed: pip install 'megarl[optimizers]'",
)
LR, DECAY = 0.02, 0.1
FLAGS = (f"--optimizer muon --lr {LR} --weight-decay {DECAY} --clip-grad 0 --adam-eps 1 --init-method-std 0.02"
         " --muon-fp32-matmul-prec highest")  # fmt: skip
TP2, SHARDED = "--tensor-model-parallel-size 2", "--use-distributed-optimizer"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
QUINTIC = (  # of five steps, leloykun.github.io/ponder/muon-opt-coeffs
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
SIMPLE = ((3.4445, -4.7750, 2.0315),)  # kellerjordan.github.io/posts/muon


def orthogonalized(gradient: Tensor, steps: int, coefficients) -> Tensor:
    """Newton-Schulz steps X ← a·X + (b·A + c·A²)·X with A = XXᵀ, from the gradient over its norm."""
    x = gradient / gradient.norm()
    x = x.T if len(x) > x.shape[1] else x
    for a, b, c in itertools.islice(itertools.cycle(coefficients), steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(gradient) > gradient.shape[1] else x


SCALES = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1, rows / columns) ** 0.5,
}


def parts_of(name: str, gradient: Tensor, split_qkv: bool) -> list[list[int]]:
    """Rows of the matrices that a weight consists of: queries, keys and values of both groups (D = 16, A = 4)."""
    if "linear_qkv" not in name or not split_qkv:
        return [list(range(len(gradient)))]
    rows = [*itertools.batched(range(len(gradient)), 16)]
    kinds = ([0, 1, 4, 5], [2, 6], [3, 7])  # heads of a group: two of queries, then its keys and values
    return [[row for head in heads for row in rows[head]] for heads in kinds]


def expected(weight: Tensor, gradient: Tensor, name: str, options: dict) -> Tensor:
    """A matrix after the first update, in float64; the momentum begins with zeros."""
    weight, gradient = weight.double(), gradient.double()
    momentum = (1 - options["momentum"]) * gradient
    step = momentum
    if options["nesterov"]:
        step = (1 - options["momentum"]) * gradient + options["momentum"] * momentum
    update = torch.empty_like(step)
    for rows in parts_of(name, gradient, options["split"]):
        part = step[rows]
        update[rows] = orthogonalized(part, options["steps"], options["coefficients"]) * SCALES[options["scale"]](
            *part.shape
        )
    return weight * (1 - LR * DECAY) - LR * options["factor"] * update


def one_update(rank: int, flags: str, shape: str = "llama", value_head: bool = False):
    """Gradients, weights before and after, whole; names of what each optimizer trains; the gradients' norm."""
    from megarl.mcore.training import optimizer

    model, wrapped, built, args, place = wrapped_model(flags, shape, value_head)
    optimizer.build_scheduler(built, args, 1).step(0)
    whole = functools.partial(gather_parameters, model, place.pg_collection.tp, args.swiglu)
    before = whole()
    if args.num_experts:  # a forward pass would need their routing
        for name, parameter in model.named_parameters():
            number = sum(map(ord, name.replace(".local_experts.", "")))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    else:
        accumulate(wrapped, built, place, 1, value_head)
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    applied, norm = optimizer.update(built)
    assert applied
    names = {id(p): name for name, p in model.named_parameters()}
    trains = {
        type(part.optimizer).__name__: {names[id(p)] for group in part.param_groups for p in group["params"]}
        for part in (built.chained_optimizers if args.params_dtype is torch.float32 else ())
    }
    return before, gradients, whole(), trains, norm


DEFAULT = {"momentum": 0.9, "nesterov": False, "split": True, "steps": 5, "coefficients": QUINTIC, "scale": "spectral",
           "factor": 1.0}  # fmt: skip
OPTIONS = {
    "": {},
    "--muon-nesterov --muon-momentum 0.8 --muon-no-split-qkv --muon-scale-mode unit_rms_norm":
        {"nesterov": True, "momentum": 0.8, "split": False, "scale": "unit_rms_norm"},
    "--muon-coefficient-type simple --muon-num-ns-steps 3 --muon-scale-mode shape_scaling"
    " --muon-extra-scale-factor 0.2": {"coefficients": SIMPLE, "steps": 3, "scale": "shape_scaling", "factor": 0.2},
}  # fmt: skip


@functools.cache
def reference(more: str):
    return run_world(one_update, 1, f"{FLAGS} {more}")[0]


@pytest.mark.parametrize("layout, size", [
    ("", 1), (TP2, 2), (SHARDED, 2), long((f"{TP2} {SHARDED}", 4)),
    long((f"--context-parallel-size 2 {SHARDED}", 2)), long(("--optimizer dist_muon", 3)),
    long(("", 2)), long((TP2, 4)), long((f"{TP2} --sequence-parallel", 2)),
    long((f"{TP2} --muon-tp-mode distributed", 2)),
])  # fmt: skip
@pytest.mark.parametrize("more", ["", *(long(row) for row in list(OPTIONS)[1:])])
def test_an_update_is_the_algorithm_in_float64(more, layout, size):
    before, gradients, _, trains, norm = reference(more)
    options = DEFAULT | OPTIONS[more]
    for _, _, after, _, found in run_world(one_update, size, f"{FLAGS} {more} {layout}"):
        assert found == pytest.approx(norm, rel=1e-5)
        for name in trains["TensorParallelMuon"]:
            wanted = expected(before[name], gradients[name], name, options)
            assert (wanted - before[name].double()).abs().max() > 1e-4
            assert float((after[name].double() - wanted).abs().max()) <= 1e-5, name


@pytest.mark.long
def test_a_model_of_16_bits_is_updated_in_fp32():
    """From gradients of 16 bits; rounded at the end."""
    ((before, gradients, after, *_),) = run_world(one_update, 1, f"{FLAGS} --bf16")
    for name in reference("")[3]["TensorParallelMuon"]:
        wanted = expected(before[name], gradients[name], name, DEFAULT)
        assert (after[name].double() - wanted).abs().max() <= 2**-8 * wanted.abs().max() + 1e-5, name


def test_blocks_of_tensor_parallel_ranks_alone():
    """`--muon-tp-mode blockwise` takes the rows or columns of each rank for a matrix."""
    before, gradients, *_ = reference("")
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    for _, _, after, *_ in run_world(one_update, 2, f"{FLAGS} {TP2} --muon-tp-mode blockwise"):
        halves = [expected(before[name][:, half], gradients[name][:, half], name, DEFAULT)
                  for half in (slice(64), slice(64, None))]  # fmt: skip
        assert (after[name].double() - torch.cat(halves, 1)).abs().max() <= 1e-5


@pytest.mark.parametrize("shape, flags, value_head", [
    ("llama", "", True), long(("gpt2", "", False)), long(("recurrent", "", False)), long(("mamba", "", False)),
    long(("latent", "", True)), long(("llama", f"{MOE} --moe-router-enable-expert-bias"
                                      " --moe-router-score-function sigmoid", False)),
])  # fmt: skip
def test_adam_trains_vectors_embeddings_and_heads(shape, flags, value_head):
    ((before, _, after, trains, _),) = run_world(one_update, 1, f"{FLAGS} {flags}", shape, value_head)
    muon, adam = trains["TensorParallelMuon"], trains["Adam"]
    assert muon | adam == before.keys() and not muon & adam
    assert all(before[name].dim() == 2 for name in muon)
    others = {name for name in adam if before[name].dim() == 2}
    assert others == {name for name in before if name.startswith(("embedding.", "output_layer.weight"))}
    assert not [name for name in before if torch.equal(before[name], after[name])]


@pytest.mark.parametrize("shape, flags, layout, size", [
    long(("gpt2", "", TP2, 2)), long(("latent", "", f"{TP2} --sequence-parallel", 2)),
    long(("recurrent", "", TP2, 2)), long(("mamba", "", TP2, 2)),
    long(("llama", "--attention-output-gate", TP2, 2)),
])  # fmt: skip
def test_an_update_is_the_same_in_other_layouts(shape, flags, layout, size):
    ((before, _, wanted, *_),) = run_world(one_update, 1, f"{FLAGS} {flags}", shape)
    for _, _, found, *_ in run_world(one_update, size, f"{FLAGS} {flags} {layout}", shape):
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            update = float((weight - before[name]).abs().max())
            assert float((found[name] - weight).abs().max()) <= 0.01 * update, name
