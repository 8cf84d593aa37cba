"""What keeps the experts of a router busy alike: auxiliary losses, the z-loss, and a learned bias of the choice.

Megatron's losses are means over what one call of the router sees. Here a loss is a sum over this rank's tokens that
count, divided by global counts of the mini-batch, as all losses of megarl are: gradients are summed over ranks and
micro-batches, so neither layout, micro-batches, padding nor blank micro-batches change them. A loss reaches the router
where backward passes; a layer that backward recomputes sees each micro-batch once with gradients, and counts it then.

What moves with an update, biases and shares, moves behind it (`settle`): an update that is skipped leaves them, too.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.config.layout_rules import listed
from megarl.mcore.moe.routing import RoutedTokens, Routing


class BalancedRouter(TopKRouter):
    """Megatron's router with losses and a bias that do not depend on the layout.

    Losses, by `--moe-router-load-balancing-type` and coefficients `--moe-aux-loss-coeff`, one of each or lists:
        seq_aux_loss: each sequence's own balance (2412.19437 eq. 17-20), mean over the sequences.
        global_aux_loss: balance over the mini-batch (2101.03961 eq. 4-6), each token's share counted in k parts. The
            share f of each expert is that of the router's last update, 1/E at the start: that of the update itself is
            known only behind its last micro-batch. It is kept in `expert_share` [E] fp32, which checkpoints hold.
    `--moe-z-loss-coeff` adds the z-loss (2202.08906 eq. 5), `--moe-router-enable-expert-bias` the bias of 2408.15664.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.frozen_expert_bias = True  # for Megatron, which moves it even where the update is skipped; see `settle`
        where, experts = device.device(), config.num_moe_experts
        self.has_share = self.get_aux_loss_coeff("global_aux_loss") > 0
        if self.has_share:
            self.register_buffer("expert_share", torch.full((experts,), 1 / experts, device=where))
        self.is_moved = self.has_share or self.enable_expert_bias
        if self.is_moved:
            counts = torch.zeros(experts, dtype=torch.int64, device=where)
            self.register_buffer("expert_counts", counts, persistent=False)  # tokens in this rank's part of the update

    def _learnt(self) -> Routing | None:
        """The routing of the micro-batch that is learnt from; None in a pass that nothing is learnt from.

        Raises:
            RuntimeError: it does not say how many tokens the mini-batch has.
        """
        if not (self.training and torch.is_grad_enabled()):
            return None
        if self.bound is None or self.bound.totals is None:
            raise RuntimeError(
                f"{'a model' if self.bound is None else self.bound.role} learns without the counts of its mini-batch, "
                f"by which losses of MoE layer {self.layer_number} are divided"
            )
        return self.bound

    def _attach(self, carrier: Tensor, name: str, routing: Routing, terms: Tensor, count: Tensor, coefficient: float):
        """`carrier`, in whose backward the loss joins: the terms [R, …] of tokens that count over a global count."""
        ignored = ~routing.rows.counted.view(-1, *[1] * (terms.dim() - 1))
        loss = terms.masked_fill(ignored, 0.0).sum() / count.clamp(min=1)
        routing.losses[name] = routing.losses.get(name, 0.0) + loss.detach()
        return MoEAuxLossAutoScaler.apply(carrier, coefficient * loss)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Logits [R, E] that carry the mean squared logarithm of their partition functions."""
        coefficient = self.config.moe_z_loss_coeff
        routing = self._learnt() if coefficient else None
        if routing is None:
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        return self._attach(logits, "z_loss", routing, squares, routing.totals.tokens, coefficient)

    def _apply_seq_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, *_, **__) -> Tensor:
        """Gates [R, E] that carry Σ_i f_i P_i of each sequence; scores and the k best of them [R, E] are live."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        routing = self._learnt() if coefficient else None
        if routing is None:
            return probs
        counts = self._counts_by_sequence(chosen, routing.rows)
        tokens = counts.sum(1, keepdim=True) / self.topk
        # f_i = E / (k T) · count_i and P_i = Σ_t s_it / T: the weight of each score is f_i / T.
        weights = counts * (self.num_experts / self.topk) / tokens.square().clamp(min=1)
        terms = scores * weights[routing.rows.sequence]
        return self._attach(probs, "aux_loss", routing, terms, routing.totals.sequences, coefficient)

    def _counts_by_sequence(self, chosen: Tensor, rows: RoutedTokens) -> Tensor:
        """[N + 1, E] tokens that each expert is chosen for, of each of the N sequences, wherever they lie."""
        counts = torch.zeros(rows.sequences + 1, self.num_experts, dtype=torch.int32, device=chosen.device)
        counts.index_add_(0, rows.sequence, (chosen & rows.counted.unsqueeze(1)).int())
        dist.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, **_) -> Tensor:
        """Gates [R, E] that carry E Σ_i f_i P_i of the mini-batch."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        routing = self._learnt() if coefficient else None
        if routing is None:
            return probs
        terms = scores * (self.num_experts * self.expert_share)
        return self._attach(probs, "aux_loss", routing, terms, routing.totals.tokens, coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None):
        """Counts the experts that worked, replayed ones too, by the map [R, E]."""
        routing = self._learnt() if self.is_moved else None
        if routing is not None:
            self.expert_counts += (routing_map & routing.rows.counted.unsqueeze(1)).sum(0)

    @torch.no_grad()
    def move(self, counts: Tensor):
        """Moves bias and share by how many tokens [E] int64 of an update each expert worked for, on all ranks."""
        if self.enable_expert_bias:  # up where an expert had fewer than the mean, in whole numbers
            less = torch.sign(counts.sum() - self.num_experts * counts)
            self.expert_bias += less * self.config.moe_router_bias_update_rate
        if self.has_share and counts.any():
            self.expert_share.copy_(counts.double() / counts.sum())


def _aux_loss_kinds(args) -> set[str]:
    """Kinds of auxiliary losses with a coefficient."""
    kinds, weights = listed(args.moe_router_load_balancing_type), listed(args.moe_aux_loss_coeff)
    return {kind for kind, weight in zip(kinds, weights, strict=True) if weight}


def aux_loss_names(args) -> list[str]:
    """Names of the losses that a role's routers have, as in `Routing.losses`."""
    has = {"aux_loss": bool(_aux_loss_kinds(args)), "z_loss": bool(args.moe_z_loss_coeff)}
    return [name for name, is_on in has.items() if args.num_experts and is_on]


def balancing_state(args) -> dict[str, bool]:
    """Buffers of a router that change what its model says or learns, and whether a role's flags ask for them."""
    return {
        "expert_bias": args.moe_router_enable_expert_bias,
        "expert_share": "global_aux_loss" in _aux_loss_kinds(args),
    }


def balanced_routers(stages) -> list[BalancedRouter]:
    """The routers of a model's chunks on this rank that something of an update moves."""
    routers = (module for chunk in stages for module in chunk.modules() if isinstance(module, BalancedRouter))
    return [router for router in routers if router.is_moved]


def finish_update(routers: list[BalancedRouter], applied: bool):
    """Ends an update: moves biases and shares if it was applied, and counts anew. Collective of each stage's ranks.

    A skipped update, with a gradient that is not finite, leaves the whole model as it was: its counts are dropped.
    """
    if applied and routers:
        counts = torch.stack([router.expert_counts for router in routers])
        dist.all_reduce(counts, group=routers[0].tp_dp_cp_group)
        for router, row in zip(routers, counts, strict=True):
            router.move(row)
    for router in routers:
        router.expert_counts.zero_()
