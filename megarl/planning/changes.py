"""Changes of flags that can save memory, each priced like the run itself: single ones, and several together."""

from collections.abc import Iterator
from typing import NamedTuple

from megarl.errors import UsageError
from megarl.planning.hardware import RANKS_PER_NODE
from megarl.planning.question import Price, Question

SHOWN = 3  # changes
MIN_SAVING = 0.01  # of the fullest rank's bytes, of a change that is shown
FULL_RECOMPUTE = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
SELECTIVE_RECOMPUTE = ("--recompute-granularity", "selective")
RECOMPUTE = ((), SELECTIVE_RECOMPUTE, FULL_RECOMPUTE)  # each takes more time than the one before
MAX_PIPELINE, MAX_CONTEXT = 8, 4
# What moves to the host, which costs more time than a layout; the last keeps the optimizer there.
HOST: tuple[tuple[str, ...], ...] = ((), ("--offload",), ("--offload", "--optimizer-cpu-offload"))


class Change(NamedTuple):
    """Flags that would be added, and the bytes of the fullest rank with them."""

    flags: tuple[str, ...]
    bytes: int


def possible_changes(price: Price) -> list[tuple[str, ...]]:
    """Changes of flags that can save memory, those that cost least time first; some may be refused."""
    settings, actor = price.program.settings, price.program.roles["actor"]
    args, longest = actor.megatron, settings.max_prompt_length + settings.max_response_length
    now = _sizes(args)
    twice = {kind: _flags(now, {kind: 2 * size}) for kind, size in now.items()}
    changes: list[tuple[str, ...]] = [
        ("--use-distributed-optimizer",),
        ("--rollout-buffer-gb", f"{settings.rollout_buffer_gb / 2:g}"),
        ("--max-tokens-per-microbatch", str(max(longest, actor.max_tokens_per_microbatch // 2))),
        SELECTIVE_RECOMPUTE,
        ("--offload",),
        FULL_RECOMPUTE,
        ("--use-distributed-optimizer", "--optimizer-cpu-offload"),
        twice["tensor"],
    ]
    changes += [twice["expert"]] if args.num_experts else []
    changes += [twice["context"], twice["pipeline"]]
    return [flags for flags in changes if flags != SELECTIVE_RECOMPUTE or args.recompute_granularity is None]


def helpful_changes(question: Question, price: Price, available: int) -> list[Change]:
    """Those with which the run fits, in the order of `possible_changes`; then those that save most."""
    now, found = price.fullest.bytes, (_priced(question, flags) for flags in possible_changes(price))
    helpful = [change for change in found if change is not None and now - change.bytes >= MIN_SAVING * now]
    return sorted(helpful, key=lambda change: 0 if change.bytes <= available else change.bytes)[:SHOWN]


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
    now = _sizes(args)
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


def _sizes(args) -> dict[str, int]:
    sizes = {kind: getattr(args, f"{kind}_model_parallel_size") for kind in ("expert", "tensor", "pipeline")}
    return sizes | {"context": args.context_parallel_size}


def _flags(now: dict[str, int], sizes: dict[str, int]) -> tuple[str, ...]:
    """Flags of the sizes that change; more tensor-parallel ranks split sequences, too."""
    words: list[str] = []
    for kind, size in sizes.items():
        if size != now[kind]:
            words += [f"--{kind}-parallel-size" if kind == "context" else f"--{kind}-model-parallel-size", str(size)]
    return (*words, *("--sequence-parallel",) * (sizes.get("tensor", 0) > max(1, now["tensor"])))
