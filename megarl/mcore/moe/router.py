"""Routers of MoE layers: Megatron's, with routes that come with the micro-batch, and recording for the engine.

Megatron keeps all routers of a process in one list, for all its models; megarl's are in it only while the engine of
their own model writes.
"""

import contextlib
from collections import deque

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.moe.balancing import BalancedRouter
from megarl.mcore.moe.routing import Routing


class RouteRecorder(RouterReplay):
    """Where a router asks which experts work: those of the micro-batch's routing, or the k best, in ascending order.

    Megatron orders them by score, but not without gradients. One order for all makes the sums over a token's gates, and
    so its numbers, the same in rollout, training and replay.
    """

    def __init__(self):
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)
        self.routing: Routing | None = None

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """(values, experts), both [R, k], of scores [R, E]; the values are the live scores of whatever was chosen."""
        _, experts = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
        experts = experts.sort(dim=-1).values
        if self.router_replay_action == RouterReplayAction.RECORD:
            self.record_indices(experts)
        elif self.routing is not None:
            experts = self.routing.choose(self.layer_number, experts)
        return scores.gather(1, experts), experts


class Router(BalancedRouter):
    """Megarl's router. `routed` gives it the routing of a micro-batch; outside it, it routes live."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.router_replay = RouteRecorder()
        # With selective recomputation of MoE layers backward calls the router alone, micro-batch by micro-batch.
        self._recomputes = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        self._is_in_layer = False
        self.to_recompute: deque[Routing | None] = deque()

    @contextlib.contextmanager
    def routed(self, routing: Routing | None):
        """Everything within belongs to one micro-batch."""
        self.router_replay.routing, self._is_in_layer = routing, True
        try:
            yield
        finally:
            self.router_replay.routing, self._is_in_layer = None, False
        if self._recomputes and self.training and torch.is_grad_enabled():
            self.to_recompute.append(routing)

    @property
    def bound(self) -> Routing | None:
        """The routing of the micro-batch that runs."""
        return self.router_replay.routing

    def gating(self, input: Tensor) -> Tensor:
        """Scores [R, 1, E] of hidden states [R, 1, H].

        On a CPU rows lie apart, as if E filled whole vectors: behind the last whole vector of a tensor functions like
        exp are computed otherwise, and a token's gates would depend on its place.
        """
        logits = super().gating(input)
        experts = logits.shape[-1]
        return logits if device.has_cuda() else pad(logits, (0, -experts % VECTOR))[..., :experts]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None):
        """(gates, map), both [R, E], of hidden states [R, 1, H]."""
        if self._is_in_layer or not self.to_recompute:
            return super().forward(input, padding_mask)
        self.router_replay.routing = self.to_recompute.popleft()
        try:
            return super().forward(input, padding_mask)
        finally:
            self.router_replay.routing = None


def routers_of(stages) -> list[Router]:
    """The routers of a model's chunks on this rank, or of one chunk, in the order of its layers."""
    return [module.router for module in stages.modules() if isinstance(module, MoELayer)]


def moe_layers_of(stages) -> tuple[int, ...]:
    """Numbers, from 1 over the whole model, of the MoE layers on this rank, in the order of its chunks."""
    return tuple(router.layer_number for router in routers_of(stages))


def check_recomputed(stages, role: str):
    """Raises RuntimeError where backward has not recomputed every micro-batch: the next step would take its routes."""
    left = {router.layer_number: len(router.to_recompute) for router in routers_of(stages) if router.to_recompute}
    if left:
        raise RuntimeError(f"{role}: routes of micro-batches that backward never recomputed, by MoE layer: {left}")


@contextlib.contextmanager
def recording_routes(model):
    """The engine's steps record the routes of this model, and of no other model of the process."""
    recorders = [router.router_replay for router in routers_of(model)]
    others, config = RouterReplay.global_router_replay_instances, model.config
    RouterReplay.global_router_replay_instances, config.moe_enable_routing_replay = recorders, True
    try:
        yield
    finally:
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()
        RouterReplay.global_router_replay_instances, config.moe_enable_routing_replay = others, False
