"""The best layouts of a model on a cluster: those that a run accepts and that fit, by estimated time of a step."""

import itertools
from collections.abc import Iterator

from megarl.errors import UsageError, flag_of
from megarl.planning import step_time, verdict
from megarl.planning.memory import GIB
from megarl.planning.step_time import Cluster
from megarl.planning.summary import Price, Question
from megarl.planning.verdict import FULL_RECOMPUTE, RECOMPUTE

SHOWN = 3
MAX_PIPELINE, MAX_CONTEXT = 16, 8
SIZES = tuple(f"{x}_parallel_size" for x in ("tensor_model", "pipeline_model", "context", "expert_model"))


def best_layouts(question: Question, cluster: Cluster, memory: float) -> dict:
    """Searches the layouts of all roles together, for `memory` GiB. A size above 1 that the question's flags set stays.

    The result is plain data: the `best` layouts that fit into `available` bytes, the `closest` one, and how many are
    `legal` and `fitting`. A layout has its `flags`, the `bytes` of its fullest rank, the estimated `seconds` of a step,
    and `expert_nodes`, over which the all-to-all of its experts goes.

    Each is parsed and checked as a run; UsageError, the last reason, if it refuses all of them. Activations are
    recomputed only as far as a layout needs it; sequences are split (context parallelism) only if no layout fits
    without; the KV cache takes memory that is left.
    """
    available, layouts = verdict.available(memory), []
    refused: UsageError | None = None
    args = question.program().roles["actor"].megatron
    for context in _sizes(MAX_CONTEXT, args.context_parallel_size):
        for flags in _layouts(question, args, context, cluster.ranks_per_node):
            try:
                layouts.append(_price(question, cluster, flags, available, args.recompute_granularity))
            except UsageError as error:
                refused = error
        if any(layout["bytes"] <= available for layout in layouts):
            break
    if not layouts:
        raise refused or UsageError("--best-layouts: no layout to search")
    fitting = sorted((each for each in layouts if each["bytes"] <= available), key=lambda each: each["seconds"])
    closest, counts = min(layouts, key=lambda each: each["bytes"]), {"legal": len(layouts), "fitting": len(fitting)}
    return {"available": available, **counts, "best": fitting[:SHOWN], "closest": closest}


def _price(question: Question, cluster: Cluster, flags, available: int, given: str | None) -> dict:
    """The layout with the least recomputation with which it fits, or the most; then with a larger cache."""
    more, price = least_recompute(question, flags, available, given)
    cache, price = _larger_cache(question, price, available)
    nodes = step_time.expert_nodes(price.program.roles["actor"].megatron, cluster.ranks_per_node)
    if (found := step_time.estimate(price, cluster)) is None:
        raise UsageError("--best-layouts: needs --bf16 or --fp16, for which the GPUs' speed is known")
    layout = {"flags": (*flags, *more, *cache), "bytes": price.fullest.bytes}
    return layout | {"seconds": found["total"], "expert_nodes": nodes}


def least_recompute(
    question: Question, flags: tuple[str, ...], available: int, given: str | None
) -> tuple[tuple[str, ...], Price]:
    """(further flags, price) of the first kind of recomputation with which the run fits into `available` bytes of a
    rank, or the last. `flags` are added to the question's; `given`: kind that these set, which stays."""
    if given:
        return (), question.price(flags)
    # Parsing takes longer than pricing, and most layouts of a search do not fit with any kind.
    full = question.price((*flags, *FULL_RECOMPUTE))
    for more, granularity in zip(RECOMPUTE[:-1], (None, "selective"), strict=True):
        if question.with_recompute(full, granularity).fullest.bytes <= available:
            return more, question.price((*flags, *more))
    return FULL_RECOMPUTE, full


def _larger_cache(question: Question, price: Price, available: int) -> tuple[tuple[str, ...], Price]:
    """(flags, price) of a cache that is doubled while it fits and a replica needs fewer rounds with it."""
    cache: tuple[str, ...] = ()
    while (now := price.roles["rollout"].cache) is not None and now.rounds > 1 and price.fullest.bytes <= available:
        size = float(f"{2 * price.program.settings.rollout_buffer_gb:g}")  # as the printed flag says
        larger = question.with_cache(price, size)
        found = larger.roles["rollout"].cache
        if larger.fullest.bytes > available or found is None or found.rounds >= now.rounds:
            break
        cache, price = ("--rollout-buffer-gb", f"{size:g}"), larger
    return cache, price


def _sizes(limit: int, given: int = 1) -> list[int]:
    """Powers of two up to a limit, or the size that the flags give."""
    return [given] if given > 1 else [2**power for power in range(limit.bit_length())]


def _layouts(question: Question, args, context: int, ranks_per_node: int) -> Iterator[tuple[str, ...]]:
    """Flags of every combination of sizes, tensor parallelism inside a node; the run may refuse some."""
    tensor, pipeline, _, expert = (getattr(args, name) for name in SIZES)
    sizes = itertools.product(
        _sizes(ranks_per_node, tensor),
        _sizes(min(MAX_PIPELINE, args.num_layers), pipeline),
        _sizes(min(args.num_experts or 1, question.world_size), expert),
    )
    for t, p, e in sizes:
        if t * p * context > question.world_size or e * p > question.world_size:
            continue
        values = dict(zip(SIZES, (t, p, context, e), strict=True))
        words = [word for name, size in values.items() if size > 1 for word in (flag_of(name), str(size))]
        words += ["--sequence-parallel"] if t > 1 else []
        # A smaller last stage where the stages do not divide the layers, unless the flags set the ends.
        if args.num_layers % p and not (
            args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
        ):
            last = args.num_layers - (p - 1) * -(-args.num_layers // p)
            words += ["--decoder-last-pipeline-num-layers", str(last)]
        yield (*words, "--use-distributed-optimizer")


def text(found: dict, cluster: Cluster) -> str:
    """The layouts as text, with flags to paste."""
    gib, closest = found["available"] / GIB, found["closest"]
    if not found["best"]:
        over = (closest["bytes"] - found["available"]) / GIB
        return (
            f"None of {found['legal']} layouts fits into {gib:.2f} GiB; the closest misses by {over:.2f} GiB:\n"
            f"  {closest['bytes'] / GIB:.2f} GiB: {' '.join(closest['flags'])}"
        )
    lines = [
        f"Best of {found['fitting']} layouts that fit into {gib:.2f} GiB ({found['legal']} are allowed), by an "
        "estimate of a step's time that was never measured",
        f"({cluster.assumptions})",
    ]
    for layout in found["best"]:
        far = f" (all-to-all over {layout['expert_nodes']} nodes)" if layout["expert_nodes"] > 1 else ""
        size = f"{layout['bytes'] / GIB:.2f} GiB"
        lines.append(f"  {layout['seconds']:,.0f} s, fullest rank {size}{far}: {' '.join(layout['flags'])}")
    return "\n".join(lines)
