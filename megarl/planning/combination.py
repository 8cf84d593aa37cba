"""Several changes of flags together with which a run fits that no single change makes fit."""

from collections.abc import Iterator

from megarl.errors import UsageError
from megarl.planning.changes import RECOMPUTE, Change
from megarl.planning.hardware import RANKS_PER_NODE
from megarl.planning.question import Price, Question

MAX_PIPELINE, MAX_CONTEXT = 8, 4
# What moves to the host, which costs more time than a layout; the last keeps the optimizer there.
HOST: tuple[tuple[str, ...], ...] = ((), ("--offload",), ("--offload", "--optimizer-cpu-offload"))


def fitting(question: Question, price: Price, available: int) -> Change | None:
    """The first combination with which the fullest rank fits, priced like the run itself; None if none does.

    Tries at most a few dozen: with a device's memory alone, then with the host's. In each case experts are divided
    first, then tensors, inside a node; then sequences, then layers. Recomputation is added last, and only as far as it
    is needed.
    """
    args = price.program.roles["actor"].megatron
    kinds = RECOMPUTE if args.recompute_granularity is None else ((),)
    for host in HOST:
        for layout in _layouts(args, question.ranks_per_node or min(RANKS_PER_NODE, question.world_size)):
            flags = ("--use-distributed-optimizer",) * (not args.use_distributed_optimizer) + layout + host
            # What does not fit with the most recomputation fits with none.
            if (most := _priced(question, (*flags, *kinds[-1]))) is None or most.bytes > available:
                continue
            found = (_priced(question, (*flags, *kind)) for kind in kinds[:-1])
            return next((change for change in found if change is not None and change.bytes <= available), most)
    return None


def _priced(question: Question, flags: tuple[str, ...]) -> Change | None:
    """The change; None if the run refuses it."""
    try:
        return Change(flags, question.price(flags).fullest.bytes)
    except UsageError:
        return None


def _layouts(args, ranks_per_node: int) -> Iterator[tuple[str, ...]]:
    """Flags of larger and larger parallel sizes, those that cost least time first."""
    now = {kind: getattr(args, f"{kind}_model_parallel_size") for kind in ("expert", "tensor", "pipeline")}
    now["context"] = args.context_parallel_size
    limits = {
        "expert": min(args.num_experts or 1, ranks_per_node),
        "tensor": min(args.num_query_groups or args.num_attention_heads, ranks_per_node),
        "context": MAX_CONTEXT,
        "pipeline": MAX_PIPELINE,
    }
    sizes = dict(now)
    yield ()
    for kind, limit in limits.items():
        before = sizes[kind]
        while 2 * sizes[kind] <= limit:
            sizes[kind] *= 2
            if kind != "pipeline" or args.num_layers % sizes[kind] == 0:
                yield _flags(now, sizes)
        if kind == "context":  # more stages save weights, too: without a context that costs time
            sizes[kind] = before


def _flags(now: dict[str, int], sizes: dict[str, int]) -> tuple[str, ...]:
    words: list[str] = []
    for kind, size in sizes.items():
        if size != now[kind]:
            words += [f"--{kind}-parallel-size" if kind == "context" else f"--{kind}-model-parallel-size", str(size)]
    return (*words, *("--sequence-parallel",) * (sizes["tensor"] > max(1, now["tensor"])))
