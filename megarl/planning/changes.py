"""Single changes of flags that can save memory, each priced like the run itself."""

from typing import NamedTuple

from megarl.errors import UsageError
from megarl.planning.question import Price, Question

SHOWN = 3  # changes
MIN_SAVING = 0.01  # of the fullest rank's bytes, of a change that is shown
FULL_RECOMPUTE = (
    "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
)  # fmt: skip
SELECTIVE_RECOMPUTE = ("--recompute-granularity", "selective")
RECOMPUTE = ((), SELECTIVE_RECOMPUTE, FULL_RECOMPUTE)  # each takes more time than the one before


class Change(NamedTuple):
    """Flags that would be added, and the bytes of the fullest rank with them."""

    flags: tuple[str, ...]
    bytes: int


def possible_changes(price: Price) -> list[tuple[str, ...]]:
    """Changes of flags that can save memory, those that cost least time first; some may be refused."""
    settings, actor = price.program.settings, price.program.roles["actor"]
    args, longest = actor.megatron, settings.max_prompt_length + settings.max_response_length
    twice = {
        kind: (f"--{kind}-model-parallel-size", str(2 * getattr(args, f"{kind}_model_parallel_size")))
        for kind in ("tensor", "pipeline", "expert")
    }
    changes: list[tuple[str, ...]] = [
        ("--use-distributed-optimizer",),
        ("--rollout-buffer-gb", f"{settings.rollout_buffer_gb / 2:g}"),
        ("--max-tokens-per-microbatch", str(max(longest, actor.max_tokens_per_microbatch // 2))),
        SELECTIVE_RECOMPUTE,
        ("--offload",),
        FULL_RECOMPUTE,
        ("--use-distributed-optimizer", "--optimizer-cpu-offload"),
        (*twice["tensor"], "--sequence-parallel"),
    ]
    changes += [twice["expert"]] if args.num_experts else []
    changes += [("--context-parallel-size", str(2 * args.context_parallel_size)), twice["pipeline"]]
    return [flags for flags in changes if flags != SELECTIVE_RECOMPUTE or args.recompute_granularity is None]


def helpful_changes(question: Question, price: Price, available: int) -> list[Change]:
    """Those with which the run fits, in the order of `possible_changes`; then those that save most."""
    now, changes = price.fullest.bytes, []
    for flags in possible_changes(price):
        try:
            changes.append(Change(flags, question.price(flags).fullest.bytes))
        except UsageError:  # the run would refuse it
            continue
    changes = [change for change in changes if now - change.bytes >= MIN_SAVING * now]
    changes.sort(key=lambda change: 0 if change.bytes <= available else change.bytes)
    return changes[:SHOWN]
