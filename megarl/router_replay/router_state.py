"""Routes of one role's model: what its passes replay, what they record, and what is measured of its experts.

To a dense model all of this is nothing. Which tokens a rank routes follows from how sequences fall into micro-batches
and from the layout; elsewhere a micro-batch is a micro-batch.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.comm.microbatches import role_microbatches
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.mcore.attention.packing import routed_tokens
from megarl.mcore.moe import router
from megarl.mcore.moe.balancing import aux_loss_names
from megarl.mcore.moe.routing import NO_ROUTE, MinibatchCounts, RoutedTokens, Routing
from megarl.router_replay.route_table import RouteTable
from megarl.router_replay.routing_metrics import RoutingStatistics, router_metrics

Microbatches = list[tuple[Batch, Tensor]]  # micro-batches, with the places of their sequences in the role's batch


class RouterState:
    """What the routers of a role's model do, on this rank."""

    def __init__(self, role: RoleSettings, role_groups: RoleGroups, stages):
        args = role.megatron
        self.role, self.role_groups, self.stages = role, role_groups, stages
        self.experts, self.topk = args.num_experts or 0, args.moe_router_topk
        self.layers = router.moe_layers_of(stages)
        # Ranks that hold the same layers and share the tokens of a micro-batch.
        self._plane = role_groups.pg_collection.tp_cp if args.sequence_parallel else role_groups.pg_collection.cp
        self.begin()

    def begin(self):
        """Starts a step: nothing is replayed, nothing is measured yet."""
        self.table: RouteTable | None = None  # what passes replay; None: the routers choose
        shape = (self.role.megatron.num_layers, self.experts, aux_loss_names(self.role.megatron), device.device())
        self._forward, self._training = RoutingStatistics.empty(*shape), RoutingStatistics.empty(*shape)

    def attach(self, batch: Batch, parts: Microbatches):
        """Gives each micro-batch its routing: the table's routes, or none."""
        if not self.experts:
            return
        missing = torch.zeros((), dtype=torch.int64, device=batch.lengths.device)
        for part, places in parts:
            rows, replayed = self._rows(part), None
            if self.table is not None:
                replayed = self.table.of(_tokens_of(batch, places, rows))
                counted = rows.counted.view(-1, 1, 1)
                missing += ((replayed == NO_ROUTE) & counted).any(-1).sum()
                replayed = replayed.masked_fill(~counted, NO_ROUTE)
            part.routing = Routing(self.role.name, self.layers, self.experts, rows, replayed)
        if self.table is not None and int(missing):
            tokens = sum(int(part.routing.rows.counted.sum()) for part, _ in parts)
            raise RuntimeError(
                f"{self.role.name}: {int(missing)} of {tokens * len(self.layers)} routes are missing ({tokens} tokens "
                f"in MoE layers {list(self.layers)})"
            )

    def _rows(self, part: Batch) -> RoutedTokens:
        return routed_tokens(
            part.host_metadata.lengths, self.role_groups.pg_collection, self.role.megatron.sequence_parallel
        )

    def train(self, parts: Microbatches):
        """Tells the micro-batches of a mini-batch the counts by which auxiliary losses are divided. Collective."""
        if not self.experts:
            return
        lengths = torch.cat([part.lengths for part, _ in parts])
        counts = torch.stack([(lengths - 1).sum(), (lengths > 1).sum()]).double()
        totals = MinibatchCounts(*self.role_groups.dp_all_reduce(counts).clamp(min=1))
        for part, _ in parts:
            part.routing.totals = totals

    def collect(self, parts: Microbatches, trained: bool):
        """Takes down what was seen of micro-batches that passed the model.

        Raises:
            RuntimeError: they did not pass all layers, or backward left some unused.
        """
        if not self.experts:
            return
        routings = [part.routing for part, _ in parts]
        for routing in routings:
            routing.check()
        if trained:
            router.check_recomputed(self.stages, self.role.name)
        (self._training if trained else self._forward).add(routings)

    def record(self, batch: Batch, parts: Microbatches) -> RouteTable:
        """The routes that micro-batches of the whole batch took, for later passes. Collective.

        Whole rows of the lane's batch on every rank, since later mini-batches cut it otherwise.
        """
        where = torch.cat([_tokens_of(batch, places, part.routing.rows) for part, places in parts])
        routes = torch.cat([part.routing.recorded(self.topk) for part, _ in parts])
        ranks = dist.get_world_size(self._plane)
        if ranks > 1:
            where, routes = _gathered(where, self._plane, ranks), _gathered(routes, self._plane, ranks)
        held = where < len(batch.tokens)
        index = torch.full((len(batch.tokens),), NO_ROUTE, dtype=torch.int64, device=where.device)
        index[where[held]] = torch.arange(int(held.sum()), device=where.device)
        return RouteTable(routes[held], index)

    def wanted(self, batch: Batch, passes: Iterable[Tensor]) -> Tensor:
        """[T] bool: tokens of the batch that this rank routes in passes over sequences at these places. Collective."""
        if dist.get_world_size(self._plane) == 1:  # all that count
            found = torch.ones(len(batch.tokens), dtype=torch.bool, device=batch.tokens.device)
            found[batch.cu_seqlens[1:] - 1] = False
            return found
        found = torch.zeros(len(batch.tokens) + 1, dtype=torch.bool, device=batch.tokens.device)
        for places in passes:
            for part, members in role_microbatches(batch, places, self.role, self.role_groups):
                rows = self._rows(part)
                tokens = _tokens_of(batch, members, rows)
                found[tokens] = found[tokens] | rows.counted
        return found[:-1]

    def metrics(self, prefix: str, replays: bool = False) -> dict[str, float]:
        """What was measured since `begin`, by name; nothing of a dense model. Collective of the role."""
        if not self.experts:
            return {}
        everyone = self.role_groups.pg_collection.intra_dist_opt
        return router_metrics(self._forward.reduced(everyone), self._training.reduced(everyone), prefix, replays)


def _tokens_of(batch: Batch, places: Tensor, rows: RoutedTokens) -> Tensor:
    """[R] int64 place in the batch of each token of a micro-batch that a rank routes; T for what is not in it."""
    tokens = torch.cat([batch.token_places(places), rows.places.new_tensor([len(batch.tokens)])])
    return tokens[rows.places.clamp(max=len(tokens) - 1)]


def _gathered(local: Tensor, group, ranks: int) -> Tensor:
    """Equal shares of all ranks of a group behind each other; as bytes, since gloo knows no int16."""
    whole = local.new_empty(ranks * len(local), *local.shape[1:])
    if whole.numel():
        dist.all_gather_into_tensor(whole.view(torch.uint8), local.contiguous().view(torch.uint8), group=group)
    return whole
