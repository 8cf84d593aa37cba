"""MoE routers: replay of a micro-batch's routes, records of routes in the rollout engine, and expert load balancing.

Megatron keeps the routers of all models of a process in one global list. megarl's routers are in it only while the
engine of their own model generates.

Megatron's losses are means over the tokens of one router call. Here, as everywhere in megarl, a loss is a sum over this
rank's counted tokens, divided by global counts of the mini-batch, so layout, micro-batches and padding do not change
it. A recomputed layer counts once, with gradients; a shared token counts in each of its sequences. Biases and expert
shares change after the update (`finish_update`), so a skipped update leaves them unchanged.
"""

import contextlib
from collections import deque

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore import device
from megarl.mcore.config.layout_rules import as_list
from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.batch_invariance import VECTOR, is_exact
from megarl.mcore.kernels.linear import at_least_rows, forward_product, linear, wide_linear
from megarl.mcore.moe.routes import RoutedTokens, Routing


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
        experts = self.chosen(experts.sort(dim=-1).values)
        return scores.gather(1, experts), experts

    def chosen(self, experts: Tensor) -> Tensor:
        """Records the live experts [R, k] of tokens, in ascending order; returns them, or those that are replayed."""
        if self.router_replay_action == RouterReplayAction.RECORD:
            self.record_indices(experts)
        elif self.routing is not None:
            return self.routing.choose(self.layer_number, experts)
        return experts


def _route_gradient(ctx, grad, *_):
    from megarl.mcore.kernels.cuda.mlp_rows import route_backward  # needs Triton

    return route_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None, None, None


@with_gradient(_route_gradient)
def _route(ctx, logits, bias, given, each, kind, scale):
    from megarl.mcore.kernels.cuda.mlp_rows import route  # needs Triton

    probs, routing_map, experts = route(logits, bias, given, each, kind, scale)
    ctx.save_for_backward(logits, routing_map)
    ctx.options = each, kind, scale
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(routing_map, experts)
    return probs, routing_map, experts


class Router(TopKRouter):
    """Megatron's router with layout-independent losses and expert bias. It takes the routes of the micro-batch inside
    `routed`, and routes live elsewhere.

    Losses, by `--moe-router-load-balancing-type` with coefficients `--moe-aux-loss-coeff`, single values or lists:
        seq_aux_loss: balance within each sequence (2412.19437 eq. 17-20), mean over sequences.
        global_aux_loss: balance over the mini-batch (2101.03961 eq. 4-6); each of a token's k experts counts 1/k. The
            share f of each expert comes from the previous update, 1/E at the start, because the current one is known
            only after the last micro-batch. The buffer `expert_share` [E] fp32 is saved in checkpoints.
    `--moe-z-loss-coeff` adds the z-loss (2202.08906 eq. 5), `--moe-router-enable-expert-bias` the bias of 2408.15664.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.frozen_expert_bias = True  # else Megatron updates it even in skipped updates; see `finish_update`
        experts = config.num_moe_experts
        self.has_share = self.get_aux_loss_coeff("global_aux_loss") > 0
        if self.has_share:
            self.register_buffer("expert_share", torch.full((experts,), 1 / experts, device=device.device()))
        self.counts_tokens = self.has_share or self.enable_expert_bias
        if self.counts_tokens:
            counts = torch.zeros(experts, dtype=torch.int64, device=device.device())
            self.register_buffer("expert_counts", counts, persistent=False)  # this rank's tokens in the update
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

    def gating(self, input: Tensor) -> Tensor:
        """Hidden states [R, 1, H] -> scores [R, 1, E]. On a CPU in fp32 the product is that of linear layers: BLAS has
        kernels for few columns whose sums depend on the number of rows on some processors. Each row is padded in memory
        to whole vectors: functions like exp compute the elements after a tensor's last whole vector differently, and a
        token's gates would depend on its position."""
        if is_exact(self.config):
            dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
            return self._product(input.to(dtype))
        if device.has_cuda():
            is_wide = self.config.moe_router_dtype == "fp32" and self.bias is None
            scores = wide_linear(input, self.weight) if is_wide else None
            return super().gating(input) if scores is None else scores
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

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None):
        """Scores [R, 1, E] -> (gates, routing map), both [R, E]; on CUDA by one kernel, except for what it does not
        compute."""
        if padding_mask is not None or not self._has_kernel(logits):
            return super().routing(logits, padding_mask)
        c, bias, experts = self.config, self.expert_bias, logits.shape[-1]
        is_first = c.moe_router_pre_softmax and self.score_function == "softmax"
        kind, scale = "softmax_first" if is_first else self.score_function, c.moe_router_topk_scaling_factor or 1.0
        logits = self.apply_z_loss(logits.reshape(-1, experts))
        probs, routing_map, live = _route(logits, bias, None, self.topk, kind, scale)
        chosen = self.router_replay.chosen(live)
        if chosen is not live:
            probs, routing_map, _ = _route(logits, bias, chosen, self.topk, kind, scale)
        self._apply_expert_bias(routing_map)
        return probs, routing_map

    def _has_kernel(self, logits: Tensor) -> bool:
        """Whether `mlp_rows.route` does what Megatron does: without groups of experts, losses of scores, capacities."""
        c = self.config
        if not logits.is_cuda or logits.dtype is torch.float64:
            return False
        is_plain = not (c.moe_router_num_groups or c.moe_expert_capacity_factor or self.is_aux_loss_enabled())
        return is_plain and self.score_function in ("softmax", "sigmoid") and not is_exact(c)

    # -- balancing -----------------------------------------------------------------------------------------------------

    def _trained_routing(self) -> Routing | None:
        """The routing of a training pass, else None. RuntimeError: it lacks the counts of the mini-batch."""
        if not (self.training and torch.is_grad_enabled()):
            return None
        routing = self.router_replay.routing
        if routing is None or routing.totals is None:
            role = "a model" if routing is None else routing.role
            raise RuntimeError(
                f"{role} trains without the counts of its mini-batch, which divide the losses of MoE layer "
                f"{self.layer_number}"
            )
        return routing

    def _attach(self, carrier: Tensor, name: str, routing: Routing, terms: Tensor, count: Tensor, coefficient: float):
        """As `_attach_sum`, of terms [R, …] of counted tokens, times the sequences that use each."""
        uses = routing.rows.uses.view(-1, *[1] * (terms.dim() - 1))
        return self._attach_sum(carrier, name, routing, terms.masked_fill(uses == 0, 0.0) * uses, count, coefficient)

    def _attach_sum(self, carrier: Tensor, name: str, routing: Routing, terms: Tensor, count: Tensor, coefficient):
        """Returns `carrier`, whose backward adds the loss: the sum of `terms` over a global count."""
        loss = terms.sum() / count.clamp(min=1)
        routing.losses[name] = routing.losses.get(name, 0.0) + loss.detach()
        return MoEAuxLossAutoScaler.apply(carrier, coefficient * loss)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attaches the mean squared logsumexp to logits [R, E]."""
        coefficient = self.config.moe_z_loss_coeff
        routing = self._trained_routing() if coefficient else None
        if routing is None:
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        return self._attach(logits, "z_loss", routing, squares, routing.totals[0], coefficient)

    def _apply_seq_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, *_, **__) -> Tensor:
        """Attaches Σ_i f_i P_i of each sequence to gates [R, E]; scores and top-k map [R, E] are live."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        routing = self._trained_routing() if coefficient else None
        if routing is None:
            return probs
        counts, (rows, sequence, counted) = self._counts_by_sequence(chosen, routing.rows), routing.rows.occurrences
        tokens = counts.sum(1, keepdim=True) / self.topk
        # f_i = E / (k T) · count_i and P_i = Σ_t s_it / T: the weight of each score is f_i / T.
        weights = counts * (self.num_experts / self.topk) / tokens.square().clamp(min=1)
        terms = scores[rows] * weights[sequence]
        terms = terms.masked_fill(~counted.unsqueeze(1), 0.0)
        return self._attach_sum(probs, "aux_loss", routing, terms, routing.totals[1], coefficient)

    def _counts_by_sequence(self, chosen: Tensor, rows: RoutedTokens) -> Tensor:
        """Returns [N + 1, E] tokens per sequence and chosen expert, over all ranks that hold the N sequences."""
        counts = torch.zeros(rows.sequences + 1, self.num_experts, dtype=torch.int32, device=chosen.device)
        at, sequence, counted = rows.occurrences
        counts.index_add_(0, sequence, (chosen[at] & counted.unsqueeze(1)).int())
        dist.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, **_) -> Tensor:
        """Attaches E Σ_i f_i P_i of the mini-batch to gates [R, E]."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        routing = self._trained_routing() if coefficient else None
        if routing is None:
            return probs
        terms = scores * (self.num_experts * self.expert_share)
        return self._attach(probs, "aux_loss", routing, terms, routing.totals[0], coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None):
        """Counts the tokens of each used expert, live or replayed, from the routing map [R, E]."""
        routing = self._trained_routing() if self.counts_tokens else None
        if routing is not None:
            self.expert_counts += (routing_map * routing.rows.uses.unsqueeze(1)).sum(0)

    @torch.no_grad()
    def apply_counts(self, counts: Tensor):
        """Updates bias and share from the tokens [E] int64 per expert in an update, summed over all ranks."""
        if self.enable_expert_bias:  # increases for experts below the mean load; integers make the comparison exact
            direction = torch.sign(counts.sum() - self.num_experts * counts)
            self.expert_bias += direction * self.config.moe_router_bias_update_rate
        if self.has_share and counts.any():
            self.expert_share.copy_(counts.double() / counts.sum())


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


# -- balancing of models -------------------------------------------------------------------------------------------


def _aux_loss_kinds(args) -> set[str]:
    """Returns the kinds of auxiliary losses with a non-zero coefficient."""
    kinds, weights = as_list(args.moe_router_load_balancing_type), as_list(args.moe_aux_loss_coeff)
    return {kind for kind, weight in zip(kinds, weights, strict=True) if weight}


def aux_loss_names(args) -> list[str]:
    """Returns the names of a role's router losses, as in `Routing.losses`."""
    enabled = {"aux_loss": bool(_aux_loss_kinds(args)), "z_loss": bool(args.moe_z_loss_coeff)}
    return [name for name, is_on in enabled.items() if args.num_experts and is_on]


def balancing_state(args) -> dict[str, bool]:
    """Returns the router buffers that affect outputs or training, and whether a role's flags enable each."""
    return {
        "expert_bias": args.moe_router_enable_expert_bias,
        "expert_share": "global_aux_loss" in _aux_loss_kinds(args),
    }


def balanced_routers(stages) -> list[Router]:
    """Returns this rank's routers with a bias or share that updates change."""
    routers = (module for chunk in stages for module in chunk.modules() if isinstance(module, Router))
    return [router for router in routers if router.counts_tokens]


def finish_update(routers: list[Router], applied: bool):
    """Updates biases and shares if the update was applied, and resets the counts. Collective over each stage's ranks. A
    skipped update (non-finite gradients) leaves the whole model unchanged; its counts are dropped."""
    if applied and routers:
        counts = torch.stack([router.expert_counts for router in routers])
        dist.all_reduce(counts, group=routers[0].tp_dp_cp_group)
        for router, row in zip(routers, counts, strict=True):
            router.apply_counts(row)
    for router in routers:
        router.expert_counts.zero_()
