"""A simple price of a layout, in seconds a step: good for ranking layouts of one model, not for predicting a run.

Matrix products at `MATRIX` operations/s stretched by the pipeline's bubble, plus what a rank sends over links of two
speeds, one after the other; writing is bound by reading the weights once a token. Nothing overlaps within a role;
roles on other ranks do. The four rates stand for a GPU of 80 GB with eight in a node.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from megarl.mcore.flags import parallel_sizes
from megarl.planning import traffic

MATRIX = 4e14  # operations/s of a rank, as reached, not as advertised
READ = 2e12  # bytes/s of a rank's memory
INSIDE, BETWEEN = 2e11, 2.5e10  # bytes/s that a rank sends inside a node, and between nodes


@dataclass(frozen=True)
class Price:
    """Seconds of a role in the three phases of a step: writing, scoring, learning."""

    write: float = 0.0
    score: float = 0.0
    learn: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.write + other.write, self.score + other.score, self.learn + other.learn)


class Model(NamedTuple):
    """Parameters of a whole model, and those of its routed experts among them."""

    total: int
    routed: int

    def on_rank(self, args) -> float:
        """Parameters of a rank, as a mean over pipeline stages."""
        sizes = parallel_sizes(args)
        dense, routed = (self.total - self.routed) / sizes.tensor, self.routed / sizes.expert / sizes.expert_tensor
        return (dense + routed) / sizes.pipeline

    def active(self, args) -> float:
        """Parameters that one token meets."""
        return self.total - self.routed * (1 - args.moe_router_topk / args.num_experts if self.routed else 0)


def price(role, kind: str, model: Model, step: traffic.Step, node: int, max_requests: int) -> Price:
    """Seconds of one role. Passes: one forward to score; forward and backward (3 forwards' work) to learn.

    Args:
        role: its RoleSettings.
        kind: as in `memory.stage_memory`.
        node: ranks that fast links join.
        max_requests: most sequences that a lane writes together.
    """
    args, sizes, ranks = role.megatron, parallel_sizes(role.megatron), len(role.ranks)
    lanes, held = sizes.data(ranks), model.on_rank(role.megatron) * role.megatron.params_dtype.itemsize
    step = step.written() if kind == "write" else step
    tokens = step.of_lane(lanes)
    forward = 2 * model.active(args) * tokens / sizes.lane_size() / MATRIX
    if kind == "write":
        waves = ceil(ceil(step.sequences / lanes) / max_requests)
        reading = waves * step.response * held * sizes.pipeline / READ
        return Price(write=forward + reading + _links(args, tokens, 1, 0, node, ranks))
    count = step.microbatches(lanes, role.max_tokens_per_microbatch)
    bubble = 1 + (sizes.pipeline - 1) / count
    score = forward * bubble + _links(args, tokens, 1, 0, node, ranks)
    if kind in ("score", "judge"):
        return Price(score=score)
    score = 0.0 if kind == "train" and step.on_policy else score
    again = step.epochs if args.recompute_granularity == "full" else 0
    learn = forward * (3 * step.epochs + again) * bubble
    learn += _links(args, tokens, step.epochs + again, step.epochs, node, ranks)
    if lanes * sizes.context > 1:  # fp32 gradients are scattered, weights gathered
        sent = step.updates * model.on_rank(args) * (4 + args.params_dtype.itemsize)
        learn += sent / (INSIDE if ranks <= node else BETWEEN)
    return Price(score=score, learn=learn)


def _links(args, tokens: int, forwards: int, backwards: int, node: int, ranks: int) -> float:
    """Seconds of sending for passes over a lane's tokens: each kind at the speed of the links that its group spans."""
    sizes = parallel_sizes(args)
    n = tokens // sizes.context
    spans = {
        traffic.tensor: sizes.tensor,
        traffic.context: sizes.tensor * sizes.context,
        traffic.expert: sizes.expert_tensor * sizes.expert,
        traffic.pipeline: ranks,
    }
    return sum(f(args, n, forwards, backwards) / (INSIDE if width <= node else BETWEEN) for f, width in spans.items())
