"""Names the first operation of an exact rollout whose bits differ from training's, on the same tokens.

Rollout and training run the same kernels of rows, one after another, so the n-th launch of a kernel in one pass is the
n-th in the other. Rows are matched by their token and position.
"""

import functools
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tools.bench import common
from tools.gpu import gap, report, run_all, sized

SHAPE = sized(common.Shape(layers=4, hidden=1024, ffn=2816, vocab=32_000, heads=16, groups=4), gap.SHAPE)
EXPERTS = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512"
DTYPE, SIZES = "bf16", sized((48, 20, 16), gap.SIZES)  # as in `gap`
SAME_KERNEL = {"megarl::paged_decode": "attention", "megarl::packed_attention": "attention"}
SKIPPED = {
    "megarl::rotate_and_store",
    "megarl::rotate_heads",
    "megarl::split_heads",
    "megarl::sample_rows",
    "megarl::uniform_rows",
    "megarl::row_logprobs",
}  # of the rollout or training alone


@dataclass
class Pass:
    """What the kernels of one forward pass read and wrote: (kernel, launch, "reads" or "writes") -> [T, …] rows."""

    tokens: list[tuple[int, int]]  # (position, token) of each row
    rows: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records the rows of all kernels of megarl's in the forward passes of a model."""

    def __init__(self, model):
        super().__init__()
        self.passes: list[Pass] = []
        self._launches: Counter[str] = Counter()
        # Experts read the tokens that were sent to them, in an order of their own.
        self._skipped = {"megarl::fixed_tile_product", "megarl::swiglu_rows"} if model.config.num_moe_experts else set()
        self._hook = model.embedding.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, _, args, kwargs):
        given = dict(zip(("input_ids", "position_ids"), args, strict=False)) | kwargs
        tokens, positions = (given[name].flatten().tolist() for name in ("input_ids", "position_ids"))
        self.passes.append(Pass([*zip(positions, tokens, strict=True)]))
        self._launches.clear()

    def __exit__(self, *error):
        self._hook.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        has_rows = out is not None  # else it changes what it was given, which others read
        if name.startswith("megarl::") and name not in SKIPPED and self.passes and has_rows:
            kernel = SAME_KERNEL.get(name, name)
            number = self._launches[kernel]
            self._launches[kernel] += 1
            written = out[0] if isinstance(out, (list, tuple)) else out
            for what, tensor in (("reads", args[0]), ("writes", written)):
                self._keep((kernel, number, what), tensor)
        return out

    def _keep(self, name: tuple[str, int, str], tensor: Tensor):
        count = len(self.passes[-1].tokens)
        if name[0] in self._skipped:
            return
        if tensor.numel() and count in (*tensor.shape[:1], tensor.numel() // tensor.shape[-1]):
            self.passes[-1].rows[name] = tensor.detach().reshape(count, -1).float().cpu()


def first_difference(flags: str, is_replayed: bool) -> dict:
    """What differs first: kernel, launch and layer, rows that differ of those compared, largest difference."""

    recorders: list[Recorder] = []

    def watch(model) -> Recorder:
        recorders.append(Recorder(model))
        return recorders[-1]

    gaps = gap.gaps(flags, is_replayed, SHAPE, SIZES, False, watch, DTYPE)
    rollout, training = recorders
    found = compare(rollout.passes, training.passes[-1])
    return {"passes": len(rollout.passes), "gap_max": float(gaps.max())} | found


def compare(rollout: list[Pass], training: Pass) -> dict:
    """Compares kernel by kernel, in training's order.

    Returns the first kernel that differs, and for each kernel how many rows it read with equal bits, and how many of
    these it wrote with others: for attention that may also be due to the keys, which are not compared.
    """
    counts = Counter(training.tokens)
    place = {row: number for number, row in enumerate(training.tokens) if counts[row] == 1}
    first, compared, kernels, equal_reads = None, 0, {}, torch.zeros(0)
    for name, expected in training.rows.items():
        differing = []
        for made in (one for one in rollout if name in one.rows):
            seen = Counter(made.tokens)
            pairs = [(n, place[row]) for n, row in enumerate(made.tokens) if row in place and seen[row] == 1]
            if pairs:
                own, other = (torch.tensor(side) for side in zip(*pairs, strict=True))
                differing.append((made.rows[name][own] - expected[other]).abs().amax(-1))
        if not differing:
            continue
        gap = torch.cat(differing)
        compared += len(gap)
        kernel, number, what = name
        if what == "reads":
            equal_reads = gap == 0
        elif (kernel, number, "reads") in training.rows and len(equal_reads) == len(gap):
            kernels.setdefault(kernel, [0, 0])
            kernels[kernel][0] += int(equal_reads.sum())
            kernels[kernel][1] += int((equal_reads & (gap > 0)).sum())
        if first is None and gap.max() > 0:
            first = {"kernel": name, "rows": len(gap), "differ": int((gap > 0).sum()), "largest": float(gap.max())}
    return {"first": first, "rows_compared": compared, "equal_reads_and_other_writes": kernels}


def run(name: str) -> bool:
    """Reports the first difference of a case; False if there is one."""
    flags, is_replayed = CASES[name]
    found = first_difference(flags, is_replayed)
    report(difference=name, **found)
    return found["first"] is None and found["rows_compared"] > 0


CASES = {
    "dense": ("--exact-rollout", False),
    "experts": (f"{EXPERTS} --exact-rollout", True),
}

if __name__ == "__main__":
    run_all({name: functools.partial(run, name) for name in CASES})
