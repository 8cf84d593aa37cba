"""Whether a planned run fits into its GPUs, and, if not, which flags would help."""

from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.errors import UsageError
from megarl.planning import hardware
from megarl.planning.memory import GIB, Memory
from megarl.planning.question import Price, Question

SHOWN = 3  # changes
MIN_SAVING = 0.01  # of the fullest rank's bytes, of a change that is shown
RESIDENT = ("weights", "gradients", "optimizer", "kv_cache", "sent_weights", "teacher_data")
FULL_RECOMPUTE = (
    "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
)  # fmt: skip
SELECTIVE_RECOMPUTE = ("--recompute-granularity", "selective")


class Change(NamedTuple):
    """Flags that would be added, and the bytes of the fullest rank with them."""

    flags: tuple[str, ...]
    bytes: int


class Component(NamedTuple):
    """A part of a rank's memory: the role that holds it, its name as a field of `Memory`, and its bytes."""

    role: str
    name: str
    bytes: int


@dataclass(frozen=True)
class Verdict:
    """The fullest rank against a GPU's memory of `memory` GiB, of which `available` bytes may be planned."""

    memory: float
    available: int
    rank: int
    roles: tuple[str, ...]
    bytes: int
    largest: Component
    changes: list[Change] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Bytes that are left on the fullest rank; negative if it does not fit."""
        return self.available - self.bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits, and so all do."""
        return self.left >= 0


def verdict(question: Question, price: Price, memory: float) -> Verdict:
    """The verdict for GPUs of `memory` GiB, with changes that help if the run does not fit."""
    fullest, available = price.fullest, hardware.available(memory)
    changes = helpful_changes(question, price, available) if fullest.bytes > available else []
    return Verdict(memory, available, fullest.fullest, fullest.roles, fullest.bytes, largest_component(price), changes)


def largest_component(price: Price) -> Component:
    """The largest component of the fullest rank."""
    rank_set = price.fullest
    held = {name: price.roles[name].memory_on(rank_set.fullest) for name in rank_set.roles}
    computing = max(held, key=lambda name: held[name].transient)
    found = [
        Component(role, name, size)
        for role, memory in held.items()
        for name, size in _components(memory, role == computing).items()
    ]
    return max(found, key=lambda component: component.bytes)


def _components(memory: Memory, computes: bool) -> dict[str, int]:
    """Bytes on the device by field while one role computes."""
    fields = [name for name in RESIDENT if computes or name not in memory.offloaded]
    sizes = {name: getattr(memory, name) for name in (*fields, *(("activations", "logits") if computes else ()))}
    sizes["kv_cache"] -= memory.kv_cache_in_gradients
    return sizes


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


def text(found: Verdict, searches: bool) -> str:
    """The verdict as text. `searches`: whether to name the search for layouts."""
    gib, reserve = found.available / GIB, found.memory - found.available / GIB
    head = f"Verdict for GPUs of {found.memory:g} GiB, of which {reserve:.2f} stay free for what is not counted: "
    where = f"rank {found.rank} ({'+'.join(found.roles)})"
    if found.fits:
        return f"{head}fits, {found.left / GIB:.2f} GiB are left on the fullest, {where}"
    role, name, size = found.largest
    lines = [
        f"{head}does not fit",
        f"The fullest, {where}, needs {found.bytes / GIB:.2f} GiB, {-found.left / GIB:.2f} more than {gib:.2f}; its "
        f"largest component: {name.replace('_', ' ')} of {role}, {size / GIB:.2f} GiB",
    ]
    if found.changes:
        lines.append("The fullest rank with one change:")
    for change in found.changes:
        note = "fits" if change.bytes <= found.available else "does not fit yet"
        saved = (found.bytes - change.bytes) / GIB
        lines.append(f"  {change.bytes / GIB:.2f} GiB ({saved:.2f} less, {note}): {' '.join(change.flags)}")
    lines += ["Layouts that fit: --best-layouts"] if searches else []
    return "\n".join(lines)


def data(found: Verdict) -> dict:
    """The verdict as plain data; bytes, except the memory of a GPU in GiB."""
    changes = [
        {"flags": list(c.flags), "bytes": c.bytes, "saved": found.bytes - c.bytes, "fits": c.bytes <= found.available}
        for c in found.changes
    ]
    return {
        "memory_gib": found.memory, "available": found.available, "fits": found.fits, "left": found.left,
        "rank": found.rank, "roles": list(found.roles), "bytes": found.bytes, "largest": found.largest._asdict(),
        "changes": changes,
    }  # fmt: skip
