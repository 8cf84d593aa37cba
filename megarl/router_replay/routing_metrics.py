"""Router statistics of a step: expert load balance, and the effect of replay on routes and log-probs."""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.mcore.moe.routes import Routing

PROBED_SEQUENCES = 64  # the first of the step


@dataclasses.dataclass
class RoutingStatistics:
    """Sums over micro-batches on this rank, by layer of the whole model; dense layers have zeros."""

    load: Tensor  # [layers, E] int64 tokens routed to each expert
    routed: Tensor  # [layers] int64 tokens
    replayed: Tensor  # [layers] int64 tokens whose routes were replayed
    differs: Tensor  # [layers] int64 replayed tokens whose router would have chosen other experts
    losses: dict[str, Tensor]  # auxiliary losses of the model, summed over layers, float64
    passes: int = 0

    @classmethod
    def empty(cls, layers: int, experts: int, losses: list[str], device) -> "RoutingStatistics":
        """All zeros. `losses` has the same names on all ranks, also on those without an MoE layer."""
        routed, replayed, differs = (torch.zeros(layers, dtype=torch.int64, device=device) for _ in range(3))
        load = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in losses}
        return cls(load, routed, replayed, differs, sums)

    def add(self, routings: list[Routing]):
        """Adds the micro-batches of one pass."""
        self.passes += 1
        for routing in routings:
            layers = torch.tensor(routing.layers, dtype=torch.int64, device=self.routed.device) - 1
            counted = routing.rows.uses.sum()
            self.load[layers] += routing.load
            self.routed[layers] += counted
            if routing.replayed is not None:
                self.replayed[layers] += counted
                self.differs[layers] += routing.differs
            for name, value in routing.losses.items():
                self.losses[name] += value

    def reduced(self, group) -> "RoutingStatistics":
        """Sums over the ranks of a group, on which each token is routed once in each layer. Collective."""
        counts = torch.cat([self.load, torch.stack([self.routed, self.replayed, self.differs], dim=1)], dim=1)
        dist.all_reduce(counts, group=group)
        losses = {}
        if self.losses:
            total = torch.stack(list(self.losses.values()))
            dist.all_reduce(total, group=group)
            losses = dict(zip(self.losses, total, strict=True))
        routed, replayed, differs = counts[:, -3:].unbind(1)
        return RoutingStatistics(counts[:, :-3], routed, replayed, differs, losses, self.passes)


def load_imbalance(load: Tensor) -> Tensor:
    """[layers] float64 MaxVio (arXiv 2408.15664 §2.1): largest load over mean load − 1; 0 is perfectly balanced."""
    load = load.double()
    return load.amax(1) / load.mean(1).clamp(min=1e-9) - 1.0


def router_metrics(
    forward: RoutingStatistics, training: RoutingStatistics, prefix: str, replays: bool
) -> dict[str, float]:
    """Metrics of a step by name, from sums over all ranks of passes without gradients and of updates. Load is measured
    in the first passes of the step, `replayed_fraction` in the updates. Disagreement is measured in the first passes
    that replay, because after an update the router also differs from its own earlier choices."""
    first, updates = (forward if forward.passes else training), (training if training.passes else forward)
    if not first.passes:
        return {}
    is_moe = first.routed > 0
    layers = [int(index) + 1 for index in is_moe.nonzero().flatten()]
    imbalance = load_imbalance(first.load[is_moe])
    metrics = {
        "load_imbalance": float(imbalance.mean()),
        "idle_experts": float((first.load[is_moe] == 0).double().mean()),
    }
    if replays:
        metrics["replayed_fraction"] = int(updates.replayed.sum()) / max(int(updates.routed.sum()), 1)
    metrics |= {f"load_imbalance/layer_{n:03d}": float(x) for n, x in zip(layers, imbalance, strict=True)}
    compared = next((s for s in (forward, training) if int(s.replayed.sum()) > 0), None)
    if compared is not None:
        metrics["disagreement"] = int(compared.differs.sum()) / int(compared.replayed.sum())
        by_layer = compared.differs.double() / compared.replayed.clamp(min=1)
        metrics |= {f"disagreement/layer_{n:03d}": float(by_layer[n - 1]) for n in layers}
    if training.passes:  # none in a step that does not update, whose model may have been scored all the same
        metrics |= {name: float(value) / training.passes for name, value in training.losses.items()}
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def probed_ids() -> torch.Tensor:
    """Ids of the probed sequences; a step may have fewer."""
    return torch.arange(PROBED_SEQUENCES)


def logprob_gaps(trainable_model, batch: Batch, forward) -> dict[str, float]:
    """Mean log-prob gap |rollout − recomputed| of the probed tokens, with replay and with live routers. Collective.
    `trainable_model` is the actor's `TrainableModel`. Resets the statistics of its routers."""
    state, positions = trainable_model.router_state, mb.positions_of(batch, probed_ids())
    table, gaps = state.replayed_routes, {}
    for name, routes in (("replayed", table), ("live", None)):
        state.replayed_routes = routes
        results = trainable_model.forward_only(trainable_model.microbatches(batch, positions), forward)
        scored = dataclasses.replace(batch)
        mb.write_back(scored, "logprobs", [(scores.logprobs, at) for scores, at in results])
        probed = scored.select(positions)
        gap = (probed.rollout_logprobs - probed.logprobs).abs().masked_fill(~probed.response_mask, 0.0).double()
        total, count = trainable_model.role_groups.dp_all_reduce(
            torch.stack([gap.sum(), probed.response_mask.sum().double()])
        )
        gaps[f"router/gap_{name}"] = float(total / count.clamp(min=1))
    state.begin_step()
    state.replayed_routes = table
    return gaps
