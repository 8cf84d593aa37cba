"""MoE routers that replay the routes of a micro-batch and record routes in the rollout engine.

Megatron keeps the routers of all models of a process in one global list. megarl's routers are in it only while the
engine of their own model generates.
"""

import contextlib
from collections import deque

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import VECTOR, is_exact
from megarl.mcore.kernels.linear import at_least_rows, forward_product, linear
from megarl.mcore.moe.balancing import BalancedRouter
from megarl.mcore.moe.routes import Routing


def topk_of_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
    """Scores [R, E] -> the k best (values, experts) of the groups with the best single experts (2405.04434 §2.2.2)."""
    best = scores.unflatten(1, (num_groups, -1)).amax(-1)
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(group_topk, dim=-1).indices, True)
    hidden = ~is_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)
    return scores.masked_fill(hidden, float("-inf")).topk(topk, dim=-1)


class RouteRecorder(RouterReplay):
    """Chooses each token's experts: the replayed ones or the top k, in ascending order. Megatron's order, by score, is
    another one without gradients; one order makes sums over a token's gates equal in rollout, training, replay."""

    def __init__(self, group_score: str):
        """`group_score`: `--moe-router-group-score`."""
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)
        self.routing: Routing | None = None
        self._is_group_max = group_score == "max"

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Scores [R, E] -> (values, experts), both [R, k]; the values are the live scores of the chosen experts."""
        compute_topk = topk_of_best_groups if self._is_group_max else default_compute_topk
        _, experts = compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
        experts = experts.sort(dim=-1).values
        if self.router_replay_action == RouterReplayAction.RECORD:
            self.record_indices(experts)
        elif self.routing is not None:
            experts = self.routing.choose(self.layer_number, experts)
        return scores.gather(1, experts), experts


class Router(BalancedRouter):
    """megarl's router. It takes the routes of the micro-batch inside `routed`, and routes live elsewhere."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.router_replay = RouteRecorder(config.moe_router_group_score)
        # With selective recomputation of MoE layers, backward calls only the router, once per micro-batch.
        self._recomputes = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        self._is_in_layer = False
        self.to_recompute: deque[Routing | None] = deque()

    @contextlib.contextmanager
    def routed(self, routing: Routing | None):
        """Applies the routing of one micro-batch inside."""
        self.router_replay.routing, self._is_in_layer = routing, True
        try:
            yield
        finally:
            self.router_replay.routing, self._is_in_layer = None, False
        if self._recomputes and self.training and torch.is_grad_enabled():
            self.to_recompute.append(routing)

    @property
    def current_routing(self) -> Routing | None:
        """Returns the routing of the current micro-batch."""
        return self.router_replay.routing

    def gating(self, input: Tensor) -> Tensor:
        """Hidden states [R, 1, H] -> scores [R, 1, E]. On a CPU in fp32 the product is that of linear layers: BLAS has
        kernels for few columns whose sums depend on the number of rows on some processors. Each row is padded in memory
        to whole vectors: functions like exp compute the elements after a tensor's last whole vector differently, and a
        token's gates would depend on its position."""
        if is_exact(self.config):
            dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
            return self._product(input.to(dtype))
        if device.has_cuda():
            return super().gating(input)
        is_single = self.config.moe_router_dtype == "fp32" or input.dtype is torch.float32
        is_double = self.config.moe_router_dtype == "fp64"
        logits = self._product(input.float()) if is_single and not is_double else super().gating(input)
        experts = logits.shape[-1]
        return pad(logits, (0, -experts % VECTOR))[..., :experts]

    def _product(self, rows: Tensor) -> Tensor:
        weight, bias = (x if x is None else x.to(rows.dtype) for x in (self.weight, self.bias))
        return at_least_rows(linear, rows, weight, bias, forward_product(self.config))

    def forward(self, input: Tensor, padding_mask: Tensor | None = None):
        """Hidden states [R, 1, H] -> (gates, routing map), both [R, E]."""
        if self._is_in_layer or not self.to_recompute:
            return super().forward(input, padding_mask)
        self.router_replay.routing = self.to_recompute.popleft()
        try:
            return super().forward(input, padding_mask)
        finally:
            self.router_replay.routing = None


def routers_of(stages) -> list[Router]:
    """Returns the routers of a model's chunks on this rank, or of one chunk, in layer order."""
    of_modules = (router for module in stages.modules() for router in vars(module).get("routers", ()))
    return [module.router for module in stages.modules() if isinstance(module, MoELayer)] or list(of_modules)


def moe_layers_of(stages) -> tuple[int, ...]:
    """Returns the layer numbers (from 1, over the whole model) of this rank's MoE layers, in chunk order."""
    return tuple(router.layer_number for router in routers_of(stages))


def check_recomputed(stages, role: str):
    """Raises RuntimeError if backward has not recomputed every micro-batch: the next step would use its routes."""
    left = {router.layer_number: len(router.to_recompute) for router in routers_of(stages) if router.to_recompute}
    if left:
        raise RuntimeError(f"{role}: routes of micro-batches that backward never recomputed, by MoE layer: {left}")


@contextlib.contextmanager
def recording_routes(model):
    """Records routes of this model, and of no other model of the process, in engine steps inside."""
    recorders = [router.router_replay for router in routers_of(model)]
    others, config = RouterReplay.global_router_replay_instances, model.config
    RouterReplay.global_router_replay_instances, config.moe_enable_routing_replay = recorders, True
    try:
        yield
    finally:
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()
        RouterReplay.global_router_replay_instances, config.moe_enable_routing_replay = others, False
