"""Whether a planned run fits into its GPUs, and, if not, which changes of flags would help, priced like the run."""

from collections.abc import Iterator

from megarl.errors import UsageError
from megarl.planning.memory import GIB
from megarl.planning.step_time import RANKS_PER_NODE
from megarl.planning.summary import Price, Question

RESERVE = 0.1  # of a GPU's memory: CUDA context, NCCL buffers, workspaces, fragmentation, errors of the estimates
RESIDENT = ("weights", "gradients", "optimizer", "kv_cache", "sent_weights", "teacher_data")
SHOWN = 3  # changes
MIN_SAVING = 0.01  # of the fullest rank's bytes, of a change that is shown
FULL_RECOMPUTE = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
SELECTIVE_RECOMPUTE = ("--recompute-granularity", "selective")
RECOMPUTE = ((), SELECTIVE_RECOMPUTE, FULL_RECOMPUTE)  # each takes more time than the one before
MAX_PIPELINE, MAX_CONTEXT = 8, 4
# What moves to the host, which costs more time than a layout; the last keeps the optimizer there.
HOST: tuple[tuple[str, ...], ...] = ((), ("--offload",), ("--offload", "--optimizer-cpu-offload"))


def available(memory_gib: float) -> int:
    """Bytes of a GPU that a plan may use."""
    return int(memory_gib * GIB * (1 - RESERVE))


def verdict(question: Question, price: Price, memory: float) -> dict:
    """The fullest rank against GPUs of `memory` GiB, as plain data; sizes in bytes, except `memory_gib`.

    `available`: what may be planned; `left`: negative if the run does not fit; `rank` with its `roles` and `bytes`;
    `largest`: see `largest_component`; if the run does not fit, `changes` with their `flags`, the fullest rank's
    `bytes`, what is `saved` and whether it `fits`; `together`: several changes with which it does if no single one is
    enough, or None.
    """
    fullest, room = price.fullest, available(memory)
    changes, together = [], None
    if fullest.bytes > room:
        changes = helpful_changes(question, price, room)
        if not any(size <= room for _, size in changes):
            together = fitting(question, price, room)
    return {
        "memory_gib": memory, "available": room, "fits": fullest.bytes <= room, "left": room - fullest.bytes,
        "rank": fullest.fullest, "roles": list(fullest.roles), "bytes": fullest.bytes,
        "largest": largest_component(price),
        "changes": [
            {"flags": list(flags), "bytes": size, "saved": fullest.bytes - size, "fits": size <= room}
            for flags, size in changes
        ],
        "together": together and {"flags": list(together[0]), "bytes": together[1]},
    }  # fmt: skip


def largest_component(price: Price) -> dict:
    """The largest component of the fullest rank: `role`, `name` and `bytes`."""
    rank_set = price.fullest
    held = {name: price.roles[name].memory_on(rank_set.fullest) for name in rank_set.roles}
    computing = max(held, key=lambda name: held[name].transient)
    found = []
    for role, memory in held.items():
        fields = [name for name in RESIDENT if role == computing or name not in memory.offloaded]
        for name in fields + ["activations", "logits"] * (role == computing):
            size = getattr(memory, name) - (memory.kv_cache_in_gradients if name == "kv_cache" else 0)
            found.append({"role": role, "name": name, "bytes": size})
    return max(found, key=lambda component: component["bytes"])


def text(found: dict, searches: bool) -> str:
    """The verdict as text. `searches`: whether the kind of GPU is given, which a search for layouts needs."""
    gib, reserve = found["available"] / GIB, found["memory_gib"] - found["available"] / GIB
    head = (
        f"Verdict for GPUs of {found['memory_gib']:g} GiB, of which {reserve:.2f} stay free for what is not counted: "
    )
    where = f"rank {found['rank']} ({'+'.join(found['roles'])})"
    if found["fits"]:
        return f"{head}fits, {found['left'] / GIB:.2f} GiB are left on the fullest, {where}"
    role, name, size = found["largest"].values()
    lines = [
        f"{head}does not fit",
        f"The fullest, {where}, needs {found['bytes'] / GIB:.2f} GiB, {-found['left'] / GIB:.2f} more than {gib:.2f}; "
        f"its largest component: {name.replace('_', ' ')} of {role}, {size / GIB:.2f} GiB",
    ]
    changes, together = found["changes"], found["together"]
    if together is not None:
        lines += ["The fullest rank with the least change that was found to fit:", _line(found, together)]
    elif changes:
        lines += ["The fullest rank with one change:", *(_line(found, change) for change in changes)]
    if together is None and not any(change["fits"] for change in changes):
        lines.append(
            "No combination of parallel sizes in a node, pipeline stages, recomputation and host memory fits: "
            "it takes more ranks, larger GPUs or shorter sequences"
        )
    search = f"{'' if searches else '--gpu NAME '}--best-layouts"
    return "\n".join([*lines, f"Layouts that fit, by an estimate of a step's time: {search}"])


def _line(found: dict, change: dict) -> str:
    note = "fits" if change["bytes"] <= found["available"] else "does not fit yet"
    saved = (found["bytes"] - change["bytes"]) / GIB
    return f"  {change['bytes'] / GIB:.2f} GiB ({saved:.2f} less, {note}): {' '.join(change['flags'])}"


# -- changes of flags, each with the bytes of the fullest rank -----------------------------------------------------


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


def helpful_changes(question: Question, price: Price, available: int) -> list[tuple[tuple[str, ...], int]]:
    """(flags, bytes) of those with which the run fits, in the order of `possible_changes`; then of those that save
    most."""
    now, found = price.fullest.bytes, (_priced(question, flags) for flags in possible_changes(price))
    helpful = [change for change in found if change is not None and now - change[1] >= MIN_SAVING * now]
    return sorted(helpful, key=lambda change: 0 if change[1] <= available else change[1])[:SHOWN]


def fitting(question: Question, price: Price, available: int) -> tuple[tuple[str, ...], int] | None:
    """(flags, bytes) of the first combination with which the fullest rank fits; None if none does.

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
            if (most := _priced(question, (*flags, *kinds[-1]))) is None or most[1] > available:
                continue
            found = (_priced(question, (*flags, *kind)) for kind in kinds[:-1])
            return next((change for change in found if change is not None and change[1] <= available), most)
    return None


def _priced(question: Question, flags: tuple[str, ...]) -> tuple[tuple[str, ...], int] | None:
    """(flags, bytes) of a change; None if the run refuses it."""
    try:
        return flags, question.price(flags).fullest.bytes
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
