"""Whether a planned run fits into its GPUs, and, if not, which flags would help."""

from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.planning import hardware
from megarl.planning.changes import Change, fitting, helpful_changes
from megarl.planning.memory import GIB
from megarl.planning.question import Price, Question

RESIDENT = ("weights", "gradients", "optimizer", "kv_cache", "sent_weights", "teacher_data")


class Component(NamedTuple):
    """A part of a rank's memory."""

    role: str
    name: str  # of a field of `Memory`
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
    together: Change | None = None  # several changes with which it fits, if no single one is enough

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
    changes, together = [], None
    if fullest.bytes > available:
        changes = helpful_changes(question, price, available)
        if not any(change.bytes <= available for change in changes):
            together = fitting(question, price, available)
    largest = largest_component(price)
    return Verdict(memory, available, fullest.fullest, fullest.roles, fullest.bytes, largest, changes, together)


def largest_component(price: Price) -> Component:
    """The largest component of the fullest rank."""
    rank_set = price.fullest
    held = {name: price.roles[name].memory_on(rank_set.fullest) for name in rank_set.roles}
    computing = max(held, key=lambda name: held[name].transient)
    found = []
    for role, memory in held.items():
        fields = [name for name in RESIDENT if role == computing or name not in memory.offloaded]
        for name in fields + ["activations", "logits"] * (role == computing):
            size = getattr(memory, name) - (memory.kv_cache_in_gradients if name == "kv_cache" else 0)
            found.append(Component(role, name, size))
    return max(found, key=lambda component: component.bytes)


def _line(found: Verdict, change: Change) -> str:
    note = "fits" if change.bytes <= found.available else "does not fit yet"
    saved = (found.bytes - change.bytes) / GIB
    return f"  {change.bytes / GIB:.2f} GiB ({saved:.2f} less, {note}): {' '.join(change.flags)}"


def text(found: Verdict, searches: bool) -> str:
    """The verdict as text. `searches`: whether the kind of GPU is given, which a search for layouts needs."""
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
    if found.together is not None:
        lines.append("The fullest rank with the least change that was found to fit:")
        lines.append(_line(found, found.together))
    elif found.changes:
        lines.append("The fullest rank with one change:")
        lines += [_line(found, change) for change in found.changes]
    if found.together is None and not any(change.bytes <= found.available for change in found.changes):
        lines.append(
            "No combination of parallel sizes in a node, pipeline stages, recomputation and host memory fits: "
            "it takes more ranks, larger GPUs or shorter sequences"
        )
    lines.append(
        f"Layouts that fit, by an estimate of a step's time: {'' if searches else '--gpu NAME '}--best-layouts"
    )
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
        "together": found.together and {"flags": list(found.together.flags), "bytes": found.together.bytes},
    }  # fmt: skip
