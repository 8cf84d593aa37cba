"""What is measured of a model's routers in a step: how evenly experts work, and what replay changed."""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.moe.routing import Routing


@dataclasses.dataclass
class RoutingStatistics:
    """Sums over the micro-batches of some passes on this rank, by layer of the whole model; dense layers have zeros."""

    load: Tensor  # [layers, E] int64 tokens that each expert worked for
    routed: Tensor  # [layers] int64 tokens
    replayed: Tensor  # [layers] int64 tokens of them whose routes were replayed
    differs: Tensor  # [layers] int64 replayed tokens for which the router would have chosen other experts
    losses: dict[str, Tensor]  # auxiliary losses that the model has, summed over the layers, float64
    passes: int = 0

    @classmethod
    def empty(cls, layers: int, experts: int, losses: list[str], device) -> "RoutingStatistics":
        """Nothing yet; the losses are the same on all ranks, which may hold no MoE layer."""
        by_layer = [torch.zeros(layers, dtype=torch.int64, device=device) for _ in range(3)]
        load = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        return cls(load, *by_layer, {name: torch.zeros((), dtype=torch.float64, device=device) for name in losses})

    def add(self, routings: list[Routing]):
        """Takes the micro-batches of one pass in."""
        self.passes += 1
        for routing in routings:
            where = torch.tensor(routing.layers, dtype=torch.int64, device=self.routed.device) - 1
            counted = routing.rows.counted.sum()
            self.load[where] += routing.load
            self.routed[where] += counted
            if routing.replayed is not None:
                self.replayed[where] += counted
                self.differs[where] += routing.differs
            for name, value in routing.losses.items():
                self.losses[name] += value

    def reduced(self, group) -> "RoutingStatistics":
        """The sums over the ranks of a group; each token of each layer is routed on one of them. Collective."""
        numbers = torch.cat([self.load, torch.stack([self.routed, self.replayed, self.differs], dim=1)], dim=1)
        dist.all_reduce(numbers, group=group)
        losses = {}
        if self.losses:
            total = torch.stack(list(self.losses.values()))
            dist.all_reduce(total, group=group)
            losses = dict(zip(self.losses, total, strict=True))
        return RoutingStatistics(numbers[:, :-3], *numbers[:, -3:].unbind(1), losses, self.passes)


def load_imbalance(load: Tensor) -> Tensor:
    """[layers] float64: how much more than the mean the busiest expert works (MaxVio of 2408.15664 §2.1); 0 is even."""
    load = load.double()
    return load.amax(1) / load.mean(1).clamp(min=1e-9) - 1.0


def router_metrics(
    forward: RoutingStatistics, training: RoutingStatistics, prefix: str, replays: bool
) -> dict[str, float]:
    """Metrics of a step by name.

    Args:
        forward: of the passes without gradients, summed over all ranks.
        training: of the updates.
        prefix: in front of each name.
        replays: whether the model is to replay routes.

    The load is that of the first pass over the batch; disagreement that of the first that replays: before any update
    the router disagrees with the rollout, behind it also with what it was. `replayed_fraction` is of the updates.
    """
    first, updates = (forward if forward.passes else training), (training if training.passes else forward)
    if not first.passes:
        return {}
    is_moe = first.routed > 0
    names = [int(number) + 1 for number in is_moe.nonzero().flatten()]
    imbalance = load_imbalance(first.load[is_moe])
    found = {
        "load_imbalance": float(imbalance.mean()),
        "idle_experts": float((first.load[is_moe] == 0).double().mean()),
    }
    if replays:
        found["replayed_fraction"] = int(updates.replayed.sum()) / max(int(updates.routed.sum()), 1)
    found |= {f"load_imbalance/layer_{n:03d}": float(x) for n, x in zip(names, imbalance, strict=True)}
    compared = next((tally for tally in (forward, training) if int(tally.replayed.sum()) > 0), None)
    if compared is not None:
        found["disagreement"] = int(compared.differs.sum()) / int(compared.replayed.sum())
        by_layer = compared.differs.double() / compared.replayed.clamp(min=1)
        found |= {f"disagreement/layer_{n:03d}": float(by_layer[n - 1]) for n in names}
    found |= {name: float(value) / training.passes for name, value in training.losses.items()}
    return {f"{prefix}/{name}": value for name, value in found.items()}
