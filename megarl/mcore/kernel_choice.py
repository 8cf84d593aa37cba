"""Which kernels compute products with weights in fp32 on a CPU, the same on all ranks.

The compiled kernels where they are built, else oneDNN's inner product, else BLAS. Rollout and training use the same
kernels, and a row's bits must not depend on the rows beside it: then their log-probs are equal to the last bit. The
compiled kernels are written so; oneDNN is taken only if a probe on the models' own sizes finds it on this processor.
"""

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.kernels import linear, native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.model import projections

AUTO, COMPILED, ONEDNN, BLAS = "auto", "compiled", "onednn", "blas"  # values of `--kernels`
KERNELS = (COMPILED, ONEDNN, BLAS)  # the fastest first
MAX_COLUMNS = 2048  # of a probed product: heads of large vocabularies take too long

Sizes = Collection[tuple[int, int]]  # (columns, inner size) of products with weights


def available() -> list[str]:
    """The kernels that this process can run, the fastest first."""
    return [COMPILED] * native.is_built() + [ONEDNN] * linear.HAS_INNER_PRODUCT + [BLAS]


def choose(wanted: str, sizes: Sizes) -> str:
    """The kernels of a run: `wanted`, or with "auto" the first that all ranks can use. A collective of the world.
    `sizes`: of the products of the run's models on one rank."""
    if wanted != AUTO:
        return wanted
    return next(name for name in KERNELS if _on_all_ranks(_is_usable(name, sizes)))


def _is_usable(name: str, sizes: Sizes) -> bool:
    """Whether this process has these kernels; of oneDNN, also whether its rows are independent, which takes a while."""
    return name in available() and (
        name != ONEDNN or all(_has_independent_rows(columns, inner) for columns, inner in sizes)
    )


def _on_all_ranks(flag: bool) -> bool:
    everywhere = torch.tensor([flag], dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


_used = AUTO


def used() -> str:
    """The kernels that this process computes with."""
    return _used


def use(name: str):
    """Makes this process compute with these kernels from now on."""
    global _used
    _used = name
    native.enable(name == COMPILED)
    linear.use_onednn(name != BLAS)


def product_sizes(args) -> set[tuple[int, int]]:
    """Sizes of the products with weights on one rank of a model with this Megatron namespace, at most `MAX_COLUMNS`
    columns each; one of them stands for its head."""
    mlp = projections.mlp_sizes(args, args.ffn_hidden_size) if not args.num_experts else projections.expert_sizes(args)
    sizes = projections.attention_sizes(args) | mlp
    ranks = args.tensor_model_parallel_size
    products = {(-(-rows // ranks), inner) for rows, inner in projections.linear_sizes(args, sizes).values()}
    products |= {*projections.latent_projections(args).values()}
    return {(min(columns, MAX_COLUMNS), inner) for columns, inner in (*products, (MAX_COLUMNS, args.hidden_size))}


@torch.no_grad()
def _has_independent_rows(columns: int, inner: int) -> bool:
    """Whether a row of oneDNN's product has the same bits whatever rows are beside it, with `MIN_ROWS` rows or more."""
    generator = torch.Generator().manual_seed(2)
    product = linear.onednn_product(torch.randn(columns, inner, generator=generator))
    return has_independent_rows(product, torch.randn(67, inner, generator=generator))


def has_independent_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether the rows of `product(x)` [67, K] have the same bits as in products of fewer rows."""
    whole = product(x)
    parts = [slice(0, MIN_ROWS), slice(3, 3 + MIN_ROWS), slice(5, 12), slice(20, 36), slice(1, 66)]
    return all(torch.equal(product(x[part].clone()), whole[part]) for part in parts)
