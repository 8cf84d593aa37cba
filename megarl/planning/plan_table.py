"""A plan as a readable table, and as plain data for JSON."""

import dataclasses
import functools

from megarl.observe import terminal
from megarl.planning.memory import GIB
from megarl.planning.summary import Plan, RolePlan

RARE = ("sent_weights", "teacher_data")  # shown where some role has them
MEMORY = ("weights", "gradients", "optimizer", "kv_cache", "activations", "logits", "total")
TRAFFIC = ("tensor", "context", "pipeline", "expert", "gradients")


def span(ranks: range) -> str:
    """A range of ranks: `0-7`, or `3`."""
    return f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else str(ranks.start)


def count(number: int) -> str:
    """A number of parameters with its unit: 671.03 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


bytes_of = functools.partial(terminal.format_bytes, digits=2)


def _columns(rows: list[list[str]]) -> list[str]:
    return terminal.table(rows, right=len(rows[0]) - 1)


def _layout(roles: list[RolePlan]) -> list[str]:
    rows = [["role", "ranks", *"TP PP VPP CP DP EP ETP SP sharded parameters active".split(), "largest rank"]]
    for role in roles:
        s = role.sizes
        sizes = [s[k] for k in ("tensor", "pipeline", "virtual", "context", "data", "expert", "expert_tensor")]
        marks = ["yes" if s[k] else "-" for k in ("sequence_parallel", "sharded")]
        held = ["-"] * 3 if role.parameters is None else [count(n) for n in role.parameters]
        rows.append([role.name, span(role.ranks), *map(str, sizes), *marks, *held])
    return _columns(rows)


def _memory(roles: list[RolePlan]) -> list[str]:
    shown = (*MEMORY, "host") if any(role.largest.offloaded or role.largest.host for role in roles) else MEMORY
    rare = [name for name in RARE if any(getattr(role.largest, name) for role in roles)]
    shown = (*shown[: MEMORY.index("total")], *rare, *shown[MEMORY.index("total") :])
    rows = [["role", "stage", *(name.replace("_", " ") for name in shown), "micro-batches of an update"]]
    for role in roles:
        if role.parameters is None:
            continue
        largest, note = role.largest, "" if role.model_role == role.name else f" ({role.model_role}'s weights)"
        sizes = [f"{largest.dict()[name] / GIB:.2f}" for name in shown]
        rows.append([role.name + note, str(role.stages.index(largest)), *sizes, str(role.microbatches or "-")])
    return _columns(rows)


def _cache(roles: list[RolePlan]) -> list[str]:
    lines = []
    for role in roles:
        if (cache := role.cache) is not None:
            gib, longest = role.largest.kv_cache / GIB, cache.longest
            lines += [
                "",
                f"KV cache of a rollout replica ({role.sizes['data']} in all), every sequence at its longest",
                f"{gib:.2f} GiB on a rank: {cache.tokens:,} tokens of {bytes_of(cache.token_bytes)}, or "
                f"{cache.full_length:,} sequences of {longest:,} tokens; {cache.responses:,} responses of a step, "
                f"{cache.decoded:,} at a time: {cache.rounds} round(s)",
            ]
            if cache.state_bytes:
                lines.append(f"recurrent states, before tokens: {cache.states:,} of {bytes_of(cache.state_bytes)}")
    return lines


def _traffic(roles: list[RolePlan]) -> list[str]:
    rows = [["role", *TRAFFIC, "all ranks"]]
    for role in roles:
        if role.traffic:
            sent = [bytes_of(role.traffic[name]) for name in TRAFFIC]
            rows.append([role.name, *sent, bytes_of(sum(role.traffic.values()) * len(role.ranks))])
    return _columns(rows)


def _rank_sets(plan: Plan) -> list[str]:
    rows = [["roles", "ranks", "fullest rank", "GiB"]]
    for rank_set in plan.rank_sets:
        names = "+".join(rank_set.roles) or "none"
        rows.append([names, str(rank_set.ranks), str(rank_set.fullest), f"{rank_set.bytes / GIB:.2f}"])
    return _columns(rows)


def _exchanges(plan: Plan) -> list[str]:
    rows = [["from", "to", "payload", "with broadcasts in replicas", "fields"]]
    for move in plan.exchanges:
        sizes = [bytes_of(move["payload"]), bytes_of(move["sent"])] if move["payload"] else ["in place", "-"]
        rows.append([move["source"], move["destination"], *sizes, ",".join(move["fields"])])
    return _columns(rows)


def _images(plan: Plan) -> list[str]:
    if plan.images is None:
        return []
    sizes = {name: bytes_of(value) for name, value in plan.images.items()}
    return [
        "",
        f"Images of prompts, {plan.images['tokens']:,} tokens each, in the host's memory of a rank",
        f"tower, on ranks that compute images: {sizes['tower']}; rows of a step, at most: {sizes['step']}; between "
        f"steps, at most: {sizes['cache']}",
    ]


def text(plan: Plan) -> str:
    """The whole plan as text."""
    roles, step = list(plan.roles.values()), plan.step
    lines = [
        f"{plan.world_size} ranks; vocabulary {plan.vocab_size}, padded {plan.padded_vocab_size}; a step: "
        f"{step.sequences} sequences of at most {step.prompt + step.response} tokens, "
        + (f"{step.greedy} greedy responses, " if step.greedy else "") + f"{step.updates} update(s)",
        "", "Layout (largest rank: parameters of the fullest stage's ranks)", *_layout(roles),
        "", "Memory of the fullest rank of each role, GiB (activations and logits are estimates)", *_memory(roles),
        "", "Memory of the fullest rank of each set of ranks, all its roles together", *_rank_sets(plan),
        *_cache(roles), *_images(plan),
        "", "Bytes that a rank sends in a step, at most (mean of the role's ranks)", *_traffic(roles),
        "", "Batch fields that move between roles in a step, at most", *_exchanges(plan),
    ]  # fmt: skip
    if plan.weights_to_rollout:
        lines += ["", f"Weights to the rollout after each step: {bytes_of(plan.weights_to_rollout)}"]
    if plan.weights_to_reference:
        lines += ["", f"Weights to the reference in each refresh: {bytes_of(plan.weights_to_reference)}"]
    return "\n".join(lines)


def data(plan: Plan) -> dict:
    """The whole plan as lists, dictionaries, numbers and strings."""
    result = dataclasses.asdict(plan)
    for name, role in plan.roles.items():
        parameters, stages = role.parameters and role.parameters._asdict(), [memory.dict() for memory in role.stages]
        result["roles"][name] |= {"ranks": span(role.ranks), "parameters": parameters, "stages": stages}
    return result
