"""Expert load balancing: auxiliary losses, the z-loss, and the expert bias.

Megatron's losses are means over the tokens of one router call. Here, as everywhere in megarl, a loss is a sum over this
rank's counted tokens, divided by global counts of the mini-batch, so layout, micro-batches and padding do not change
it. A recomputed layer counts once, with gradients; a shared token counts in each of its sequences. Biases and expert
shares change after the update (`finish_update`), so a skipped update leaves them unchanged.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.config.layout_rules import as_list
from megarl.mcore.moe.routes import RoutedTokens, Routing


class BalancedRouter(TopKRouter):
    """Megatron's router with layout-independent losses and expert bias.

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

    def _trained_routing(self) -> Routing | None:
        """The routing of a training pass, else None. RuntimeError: it lacks the counts of the mini-batch."""
        if not (self.training and torch.is_grad_enabled()):
            return None
        if self.current_routing is None or self.current_routing.totals is None:
            role = "a model" if self.current_routing is None else self.current_routing.role
            raise RuntimeError(
                f"{role} trains without the counts of its mini-batch, which divide the losses of MoE layer "
                f"{self.layer_number}"
            )
        return self.current_routing

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
        return self._attach(logits, "z_loss", routing, squares, routing.totals.tokens, coefficient)

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
        return self._attach_sum(probs, "aux_loss", routing, terms, routing.totals.sequences, coefficient)

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
        return self._attach(probs, "aux_loss", routing, terms, routing.totals.tokens, coefficient)

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


def balanced_routers(stages) -> list[BalancedRouter]:
    """Returns this rank's routers with a bias or share that updates change."""
    routers = (module for chunk in stages for module in chunk.modules() if isinstance(module, BalancedRouter))
    return [router for router in routers if router.counts_tokens]


def finish_update(routers: list[BalancedRouter], applied: bool):
    """Updates biases and shares if the update was applied, and resets the counts. Collective over each stage's ranks. A
    skipped update (non-finite gradients) leaves the whole model unchanged; its counts are dropped."""
    if applied and routers:
        counts = torch.stack([router.expert_counts for router in routers])
        dist.all_reduce(counts, group=routers[0].tp_dp_cp_group)
        for router, row in zip(routers, counts, strict=True):
            router.apply_counts(row)
    for router in routers:
        router.expert_counts.zero_()
