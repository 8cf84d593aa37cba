"""Kernels and threads chosen by measurement: once for each machine and model shape, then read from a file.

Candidates for products with weights are the compiled kernels, oneDNN and BLAS. One is a candidate only if a probe finds
that a row's bits do not depend on the rows beside it: rollout and training use the same kernels, so their log-probs are
then equal to the last bit. The threads of the compiled kernels change no bit.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.kernel_names import KERNELS
from megarl.mcore.kernels import linear, native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.model import projections

COMPILED, ONEDNN, BLAS = KERNELS
CLEARLY = 1.2  # times as fast as an earlier one of `KERNELS` must a later one be
ROWS = (8, 64, 256)  # of a decode step with few and with many requests, and of a micro-batch
ROUNDS, SECONDS = 3, 0.002  # of each measurement
LARGEST_COLUMNS = 2048  # of a measured product: heads of large vocabularies take too long
PARALLEL_WORK = 2**20  # multiply-adds, without a measurement
NEVER = 2**62
FOLDER = native.own_folder()  # of the files

Sizes = tuple[tuple[int, int], ...]  # (columns, inner size) of the products with weights of a model


@dataclasses.dataclass(frozen=True)
class Choices:
    """What was chosen."""

    kernels: str  # one of `KERNELS`
    parallel_work: int  # multiply-adds from which a compiled kernel uses all threads
    times: dict[str, float]  # of each candidate, relative to the fastest; empty without a measurement

    def __str__(self) -> str:
        others = ", ".join(f"{name} {ratio:.1f}" for name, ratio in self.times.items() if name != self.kernels)
        text = f"kernels: {self.kernels}" + (f" (times as long: {others})" if others else "")
        threads = torch.get_num_threads()
        if self.kernels != COMPILED or threads == 1:
            return text
        limit = (
            "one thread" if self.parallel_work == NEVER else f"{threads} threads from {self.parallel_work:,} products"
        )
        return f"{text}; {limit}"


def available() -> list[str]:
    """The kernels that this process can run, best first."""
    return [COMPILED] * native.is_built() + [ONEDNN] * linear.HAS_INNER_PRODUCT + [BLAS]


def apply(choices: Choices):
    """Makes this process compute with these choices."""
    native.enable(choices.kernels == COMPILED)
    linear.use_onednn(choices.kernels != BLAS)
    if native.is_built():
        native.ops.set_parallel_work(choices.parallel_work)


def choose(sizes: Sizes, is_fresh: bool) -> tuple[Choices, Path | None]:
    """Reads the choices for these products from the file, or measures them and writes it.

    Returns the choices, and the file they came from; None: they were measured. A file that cannot be written is no
    error: the next start measures again.
    """
    path = _file(sizes)
    if not is_fresh:
        try:
            return Choices(**json.loads(path.read_text())), path
        except (OSError, ValueError, TypeError):
            pass
    choices = measure(sizes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(dataclasses.asdict(choices)) + "\n")
        made.replace(path)
    except OSError:
        pass
    return choices, None


def _file(sizes: Sizes) -> Path:
    """Named by all that the measurement depends on."""
    library = native.library_path().name  # by processor, torch and sources
    what = [library, available(), torch.get_num_threads(), sizes]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return FOLDER / f"choices-{key}.json"


def product_sizes(args) -> set[tuple[int, int]]:
    """Sizes of the products with weights on one rank of a model with this Megatron namespace; a large one stands for
    its head."""
    ffn = args.ffn_hidden_size if args.num_experts is None else args.moe_ffn_hidden_size or args.ffn_hidden_size
    sizes = projections.attention_sizes(args) | projections.mlp_sizes(args.hidden_size, ffn)
    products, ranks = projections.linear_sizes(args, sizes).values(), args.tensor_model_parallel_size
    return {(LARGEST_COLUMNS, args.hidden_size), *((-(-columns // ranks), inner) for columns, inner in products)}


@torch.no_grad()
def seconds_of_work(sizes: Sizes, rows: int, tokens: int) -> tuple[float, float]:
    """Seconds of the products with weights of these sizes in a decode step of some rows, and in the forward and
    backward passes over some tokens, with this process's kernels and threads."""
    decode = update = 0.0
    for columns, inner in sizes:
        weight = torch.randn(min(columns, LARGEST_COLUMNS), inner)
        decode += _least_seconds(_product(available()[0], weight), torch.ones(rows, inner))
        x, grad = torch.ones(tokens, inner), torch.ones(tokens, len(weight))
        update += _least_seconds(lambda x, weight=weight: linear.matmul(x, weight), x)
        update += _least_seconds(lambda grad, weight=weight: linear.input_gradient(grad, weight), grad)
        update += _least_seconds(lambda grad, x=x: linear.weight_gradient(grad, x), grad)
    return decode, update


@torch.no_grad()
def measure(sizes: Sizes) -> Choices:
    """Measures every candidate on products of these sizes: less than a second for most models."""
    generator = torch.Generator().manual_seed(1)
    shapes = sorted({(min(columns, LARGEST_COLUMNS), inner) for columns, inner in sizes})
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    products = {name: [_product(name, w) for w in weights] for name in available()}
    inner = [w.shape[1] for w in weights]
    candidates = [name for name, made in products.items() if all(map(_is_invariant, made, inner))]
    inputs = [[torch.ones(rows, size) for rows in ROWS] for size in inner]
    seconds = {name: [float("inf")] * len(weights) * len(ROWS) for name in candidates or [BLAS]}
    for _ in range(ROUNDS):  # in turns, because other programs come and go
        for name, times in seconds.items():
            pairs = zip(products[name], inputs, strict=True)
            times[:] = map(min, times, [_least_seconds(product, x) for product, of_size in pairs for x in of_size])
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    relative = {
        name: sum(time / best for time, best in zip(times, fastest, strict=True)) / len(times)
        for name, times in seconds.items()
    }
    chosen = next(iter(relative))
    for name, ratio in relative.items():
        if ratio * CLEARLY < relative[chosen]:
            chosen = name
    least = relative[min(relative, key=relative.get)]
    times = {name: round(ratio / least, 2) for name, ratio in relative.items()}
    return Choices(chosen, _parallel_work(weights) if chosen == COMPILED else PARALLEL_WORK, times)


def _product(name: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x -> x · weightᵀ by a kernel, with the weight in its layout."""
    if name == COMPILED:
        packed = native.ops.pack_weight(weight)
        return lambda x: native.ops.packed_linear(x, packed, len(weight), None)
    if name == ONEDNN:
        return linear.onednn_product(weight)
    return lambda x: torch.nn.functional.linear(x, weight)


def _is_invariant(product: Callable[[Tensor], Tensor], inner: int) -> bool:
    """Whether a row's bits are the same whatever rows are beside it, with at least `MIN_ROWS` rows."""
    x = torch.randn(67, inner, generator=torch.Generator().manual_seed(2))
    whole = product(x)
    parts = [slice(0, MIN_ROWS), slice(3, 3 + MIN_ROWS), slice(5, 12), slice(20, 36), slice(1, 66)]
    return all(torch.equal(product(x[part].clone()), whole[part]) for part in parts)


def _least_seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The shortest of the runs within `SECONDS`, but of two at least: other programs only make runs longer."""
    product(x)
    least, end, runs = float("inf"), time.perf_counter() + SECONDS, 0
    while runs < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        product(x)
        least, runs = min(least, time.perf_counter() - start), runs + 1
    return least


def _parallel_work(weights: list[Tensor]) -> int:
    """The fewest multiply-adds from which all threads are clearly faster than one, for all measured products."""
    threads = torch.get_num_threads()
    if threads == 1:
        return PARALLEL_WORK
    weight = max(weights, key=Tensor.numel)
    product, limit = _product(COMPILED, weight), NEVER
    try:
        for rows in (256, 128, 64, 32, 16, 8, 4):
            x, seconds = weight.new_ones(rows, weight.shape[1]), []
            for work in (0, NEVER):
                native.ops.set_parallel_work(work)
                seconds.append(_least_seconds(product, x))
            if seconds[0] * CLEARLY > seconds[1]:
                break
            limit = rows * weight.numel()
    finally:
        native.ops.set_parallel_work(PARALLEL_WORK)
    return limit
