"""The routers of one role's model: routes that its passes replay, routes that they record, and expert statistics.

A route is the k experts of a token in an MoE layer: int16, ascending (arXiv 2510.11370 §3.2: the mask that is
replayed). A sequence's last token has none: all k entries are −1. For a dense model every call does nothing. The tokens
that a rank routes depend on the split into micro-batches and on the parallel layout.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.comm import exchange
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.mcore.attention.packing import routed_tokens
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.mcore.moe import router
from megarl.mcore.moe.routes import NO_ROUTE, RoutedTokens, Routing

Microbatches = list[tuple[Batch, Tensor]]  # micro-batches, with the positions of their sequences in the batch


@dataclass(frozen=True)
class RouteTable:
    """Routes of some tokens of a replica's batch in the L MoE layers of this rank."""

    rows: Tensor  # [R, L, k] int16
    index: Tensor  # [T] int64, row of each token of the batch; −1: no route

    @classmethod
    def of_rows(cls, tokens: Tensor, rows: Tensor, count: int) -> "RouteTable":
        """The table of rows [R, L, k] that are the routes of `tokens` [R], among `count` tokens of the batch."""
        index = torch.full((count,), NO_ROUTE, dtype=torch.int64, device=tokens.device)
        index[tokens] = torch.arange(len(tokens), device=tokens.device)
        return cls(rows, index)

    def of(self, tokens: Tensor) -> Tensor:
        """[n, L, k] int16 routes of tokens at positions [n] in the batch; −1 without a route; T and above: padding."""
        if not len(self.rows):
            return self.rows.new_full((len(tokens), *self.rows.shape[1:]), NO_ROUTE)
        last = len(self.index) - 1
        row = torch.where(tokens > last, NO_ROUTE, self.index[tokens.clamp(max=last)])
        return torch.where((row < 0)[:, None, None], NO_ROUTE, self.rows[row.clamp(min=0)])


class RouterState:
    """State of the routers of a role's model on this rank."""

    def __init__(self, role: RoleSettings, role_groups: RoleGroups, stages):
        args, shape = role.megatron, RoutedLayers.of(role.megatron)
        self.role = role
        self.role_groups = role_groups
        self.stages = stages
        self.experts, self.topk = shape.experts, shape.topk
        # A module of transformers may have layers without attention, which its number of layers does not count.
        self._layers = max([args.num_layers, *shape.numbers])
        self.layers = router.moe_layers_of(stages)
        # Ranks that hold the same layers and split the tokens of a micro-batch.
        self._token_group = role_groups.pg_collection.tp_cp if args.sequence_parallel else role_groups.pg_collection.cp
        self.begin_step()

    def begin_step(self):
        """Starts a step: removes the routes to replay and resets the statistics."""
        self.replayed_routes: RouteTable | None = None  # routes to replay; None: the routers choose
        losses = router.aux_loss_names(self.role.megatron)
        self._forward, self._training = (
            RoutingStatistics.empty(self._layers, self.experts, losses, device.device()) for _ in range(2)
        )

    def attach(self, batch: Batch, microbatches: Microbatches):
        """Sets the `routing` of each micro-batch, with replayed routes. RuntimeError: the table lacks some of them."""
        if not self.experts:
            return
        missing = torch.zeros((), dtype=torch.int64, device=batch.lengths.device)
        for microbatch, positions in microbatches:
            rows, replayed = self._rows(microbatch), None
            if self.replayed_routes is not None:
                replayed = self.replayed_routes.of(_tokens_of(batch, positions, rows))
                counted = rows.counted.view(-1, 1, 1)
                missing += ((replayed == NO_ROUTE) & counted).any(-1).sum()
                replayed = replayed.masked_fill(~counted, NO_ROUTE)
            microbatch.routing = Routing(self.role.name, self.layers, self.experts, rows, replayed)
        if self.replayed_routes is not None and int(missing):
            tokens = sum(int(microbatch.routing.rows.counted.sum()) for microbatch, _ in microbatches)
            raise RuntimeError(
                f"{self.role.name}: {int(missing)} of {tokens * len(self.layers)} routes are missing ({tokens} tokens "
                f"in MoE layers {list(self.layers)})"
            )

    def _rows(self, microbatch: Batch) -> RoutedTokens:
        host, pg_collection = microbatch.host_metadata, self.role_groups.pg_collection
        return routed_tokens(host.lengths, pg_collection, self.role.megatron.sequence_parallel, host.shared)

    def set_token_counts(self, microbatches: Microbatches):
        """Sets the mini-batch's token and sequence counts, by which auxiliary losses are divided. Collective."""
        if not self.experts:
            return
        lengths = torch.cat([microbatch.host_metadata.lengths for microbatch, _ in microbatches])
        counts = torch.stack([(lengths - 1).sum(), (lengths > 1).sum()]).double().to(device.device())
        tokens, sequences = self.role_groups.dp_all_reduce(counts).clamp(min=1)
        for microbatch, _ in microbatches:
            microbatch.routing.totals = tokens, sequences

    def add_statistics(self, microbatches: Microbatches, trained: bool):
        """Adds the statistics of micro-batches after a pass; `trained`: it was a pass with backward. RuntimeError: a
        layer did not route a micro-batch, or recomputation in backward left routes unused."""
        if not self.experts:
            return
        routings = [microbatch.routing for microbatch, _ in microbatches]
        for routing in routings:
            routing.check()
        if trained:
            router.check_recomputed(self.stages, self.role.name)
        (self._training if trained else self._forward).add(routings)

    def record(self, batch: Batch, microbatches: Microbatches) -> RouteTable:
        """The routes that the micro-batches of the whole batch took, to be replayed by later passes. Collective. Every
        rank gets the routes of all tokens of its replica, because later mini-batches split them differently. The tokens
        of a shared prompt have the routes of the sequence that held it, for each sequence."""
        tokens = torch.cat([_tokens_of(batch, positions, m.routing.rows) for m, positions in microbatches])
        routes = torch.cat([m.routing.recorded(self.topk) for m, _ in microbatches])
        tokens, routes = (exchange.all_gather(local, self._token_group) for local in (tokens, routes))
        is_token = tokens < len(batch.tokens)  # others are padding
        table = RouteTable.of_rows(tokens[is_token], routes[is_token], len(batch.tokens))
        for microbatch, positions in microbatches:
            if (shared := mb.shared_tokens(microbatch.host_metadata)) is not None:
                own, held = (batch.token_positions(positions)[of] for of in shared)
                table.index[own] = table.index[held]
        return table

    def wanted(self, batch: Batch, passes: Iterable[Tensor]) -> Tensor:
        """[T] bool: tokens that this rank routes in `passes`, each the positions of its sequences. Collective."""
        if dist.get_world_size(self._token_group) == 1:
            return torch.ones_like(batch.tokens, dtype=torch.bool)
        wanted = torch.zeros(len(batch.tokens) + 1, dtype=torch.bool, device=batch.tokens.device)
        for of_pass in passes:
            for microbatch, positions in mb.role_microbatches(batch, of_pass, self.role, self.role_groups):
                wanted[_tokens_of(batch, positions, self._rows(microbatch))] = True
        return wanted[:-1]

    def metrics(self, prefix: str, replays: bool = False) -> dict[str, float]:
        """Router metrics since `begin_step`; {} for a dense model. A collective of the role."""
        if not self.experts:
            return {}
        all_ranks = self.role_groups.pg_collection.intra_dist_opt
        return router_metrics(self._forward.reduced(all_ranks), self._training.reduced(all_ranks), prefix, replays)


def _tokens_of(batch: Batch, positions: Tensor, rows: RoutedTokens) -> Tensor:
    """[R] int64 position in the batch of each row that this rank routes of a micro-batch; T for padding."""
    tokens = torch.cat([batch.token_positions(positions), rows.token_indices.new_tensor([len(batch.tokens)])])
    return tokens[rows.token_indices.clamp(max=len(tokens) - 1)]


# -- statistics of a step: expert load balance, and the effect of replay on routes and log-probs -----------------------


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
