"""Router replay of the rollout's routes (R3, arXiv 2510.11370): sends them to the ranks that replay them.

Training passes take the rollout's routes: if kernels or precision differ, both may choose different experts, and
the ratio of their probabilities diverges. Routes flow one way, and nobody asks for them: a replica of the rollout
sends another role's replica the rows of the sequences that both hold, all tokens but each last; each side computes
which. The ranks of a replica with the same layers get an equal share each, and gather the others from each other.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch, expand_ranges
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR, ROLLOUT, StepBatch
from megarl.mcore import device
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.router_replay.router_state import RouterState, RouteTable


class RoutingReplay:
    """Sends the rollout's routes to the roles that replay them."""

    def __init__(
        self,
        settings: Settings,
        policy: RoleSettings,
        mesh: RoleMesh,
        recorded_layers: tuple[int, ...] | None,
        router_states: dict[str, RouterState],
        actor_passes: Callable[[StepBatch], list[Tensor]],
    ):
        """With `--router-replay rollout`, gathers which rank holds which MoE layers of the policy. Collective.
        `policy`: the actor's settings; `recorded_layers`, `actor_passes`: `Rollout.recorded_layers` and
        `Actor.passes_of_step`; `router_states`: of this rank's models, by role."""
        self._router_states, self._actor_passes = router_states, actor_passes
        self._exchange = None
        self._roles = ("actor", "reference") if settings.router_replay_reference else ("actor",)
        if settings.router_replay == "rollout":
            layers = {name: router_states[name].layers for name in self._roles if name in router_states}
            layers[ROLLOUT] = recorded_layers
            shape = RoutedLayers.of(policy.megatron)
            self._exchange = RouteExchange(mesh, layers, shape.topk, shape.experts)

    def begin_step(self):
        """Resets the routers of all models: removes routes to replay, and statistics."""
        for state in self._router_states.values():
            state.begin_step()

    def send_routes(self, step_batch: StepBatch):
        """Sends each rank the routes that it replays in the step, for its own tokens and layers only. Ranks that only
        generate do not wait (`StepBatch.wait_sends`). Collective."""
        for role in self._roles if self._exchange else ():
            self._send_routes(step_batch, role)

    def _send_routes(self, step_batch: StepBatch, role: str):
        batch, state = step_batch[role], self._router_states.get(role)
        wanted = None
        with step_batch.exchange_phase(ROLLOUT, role):
            if state is not None:
                passes = self._actor_passes(step_batch) if role == ACTOR else [torch.arange(len(batch))]
                wanted = state.wanted(batch, passes)
            pending = step_batch.pending_sends(ROLLOUT, role)
            table = self._exchange.send(step_batch[ROLLOUT], role, batch, wanted, step_batch.dp_assignment, pending)
            if state is not None:
                state.replayed_routes = table


class RouteExchange:
    """Transfers routes from the rollout to the roles that replay them; knows which rank holds which MoE layers."""

    def __init__(self, mesh: RoleMesh, layers: dict[str, tuple[int, ...]], topk: int, experts: int):
        """Gathers which rank holds which layers. A collective of the world. `layers`: role of this rank -> numbers of
        the MoE layers that this rank holds; those of the rollout in the order in which its batch has the routes.
        RuntimeError: a replica of the rollout lacks a layer that a role has."""
        self.mesh = mesh
        self.topk, self.experts = topk, experts
        held = {role: (tuple(layers[role]), self._own_share(role)) for role in layers if mesh[role].is_member}
        self._held: list[dict[str, tuple[tuple[int, ...], slice]]] = [{} for _ in range(mesh.size)]
        dist.all_gather_object(self._held, held)
        self._by_layer: list[dict[int, list[int]]] = [{} for _ in mesh[ROLLOUT].replicas]  # ranks of each replica
        for by_layer, ranks in zip(self._by_layer, mesh[ROLLOUT].replicas, strict=True):
            for rank in ranks:
                for layer in self.layers(ROLLOUT, rank):
                    by_layer.setdefault(layer, []).append(rank)
        for role in sorted({role for held in self._held for role in held} - {ROLLOUT}):
            self._check_holders(role)

    def _own_share(self, role: str) -> slice:
        group = self.mesh[role].pg_collection.tp_cp
        return slice(dist.get_rank(group), None, dist.get_world_size(group))

    def layers(self, role: str, rank: int) -> tuple[int, ...]:
        """MoE layers of a role on a rank."""
        return self._held[rank][role][0] if role in self._held[rank] else ()

    def _share(self, role: str, rank: int) -> slice:
        """Rows of its replica that a rank gets: every n-th, since n ranks of the replica hold the same layers."""
        return self._held[rank][role][1]

    def _check_holders(self, role: str):
        """RuntimeError if a replica of the rollout lacks a layer that the role has."""
        wanted = {layer for rank in self.mesh[role].ranks for layer in self.layers(role, rank)}
        for dp_rank, held in enumerate(self._by_layer):
            missing = sorted(wanted - set(held))
            if missing:
                raise RuntimeError(
                    f"{role}: routes of MoE layers {missing} ({len(missing)} of {len(wanted)}) are on no rank of the "
                    f"rollout's replica {dp_rank}, which has layers {sorted(held)}"
                )

    def _senders(self, role: str, rank: int, dp_rank: int) -> dict[int, list[int]]:
        """Sending rank in the rollout's replica `dp_rank` -> layers that it sends to `rank`. A rank sends to itself
        where it can; otherwise the holders of a layer share the receivers round-robin."""
        senders, index = {}, self.mesh[role].ranks.index(rank)
        for layer in self.layers(role, rank):
            holders = self._by_layer[dp_rank][layer]
            sender = rank if rank in holders else holders[index % len(holders)]
            senders.setdefault(sender, []).append(layer)
        return senders

    def send(
        self,
        source: Batch | None,
        destination: str,
        batch: Batch | None,
        wanted: Tensor | None,
        dp_assignment: dict[str, Tensor],
        pending: exchange.PendingSends | None = None,
    ) -> RouteTable | None:
        """The routes of the wanted tokens in this rank's layers; None outside the destination.

        A collective of the ranks of rollout and destination; others return at once.

        Args:
            source, batch: this rank's batch in the rollout with `routes`, and in the destination.
            wanted: [T] bool, tokens of `batch` whose routes this rank needs; a sequence's last token has none.
            dp_assignment, pending: as in `exchange.send`.

        Raises:
            RuntimeError: routes were not recorded for every token and layer; the two sides disagree about the rows; a
                route is not k ascending experts. Raised only on the rank that detects it.
        """
        sender, receiver = self.mesh[ROLLOUT], self.mesh[destination]
        if not sender.is_member and not receiver.is_member:
            return None
        group = self.mesh.channel(f"routes/{destination}")
        ranks = dist.get_process_group_ranks(group)
        routes = dict.fromkeys(ranks, torch.empty(0, dtype=torch.uint8, device=device.device()))
        if sender.is_member:
            self._check_source(source)
            routes |= self._routes_by_rank(source, destination, dp_assignment[destination])
        received = exchange.all_to_all([routes[rank] for rank in ranks], group, pending if sender.is_member else None)
        if not receiver.is_member:
            return None
        by_rank = dict(zip(ranks, received, strict=True))
        return self._table(destination, batch, wanted, dp_assignment[ROLLOUT], by_rank)

    def _check_source(self, source: Batch | None):
        layers = list(self.layers(ROLLOUT, self.mesh.rank))
        if not layers:
            return
        if source is None or source.routes is None:
            raise RuntimeError(f"rollout: no routes of MoE layers {layers} were recorded, 0 of {len(layers)} layers")
        shape = [len(source.tokens), len(layers), self.topk]
        if len(source) and list(source.routes.shape) != shape:
            raise RuntimeError(
                f"rollout: routes of MoE layers {layers} have shape {list(source.routes.shape)}, but its batch has "
                f"{shape[0]} tokens, {shape[1]} layers and {shape[2]} experts per token"
            )

    def _routes_by_rank(self, source: Batch, destination: str, dp_assignment: Tensor) -> dict[int, Tensor]:
        """Receiving rank -> its share of the rows, in the layers sent to it: [rows · layers · k] int16 as bytes."""
        rank, dp_rank, routes = self.mesh.rank, self.mesh[ROLLOUT].dp_rank, {}
        held = self.layers(ROLLOUT, rank)
        for receiving, tokens in _routed_tokens(source, dp_assignment).items():
            tokens = tokens.to(device.device())
            for receiver in self.mesh[destination].replicas[receiving]:
                if layers := self._senders(destination, receiver, dp_rank).get(rank):
                    rows = tokens[self._share(destination, receiver)]
                    columns = [held.index(layer) for layer in layers]
                    routes[receiver] = source.routes[rows[:, None], columns].flatten().view(torch.uint8)
        return routes

    def _table(
        self, destination: str, batch: Batch, wanted: Tensor, dp_assignment: Tensor, received: dict[int, Tensor]
    ) -> RouteTable:
        """`received`: bytes of `_routes_by_rank` by sending rank."""
        tokens, ranks = _routed_tokens(batch, dp_assignment), self._share(destination, self.mesh.rank).step
        rows = self._rows_of_share(destination, tokens, received)
        rows = exchange.all_gather(rows, self.mesh[destination].pg_collection.tp_cp)
        # Column i: the tokens of the i-th rank's rows; T is padding.
        columns = [pad(t, (0, -len(t) % ranks), value=len(wanted)).view(-1, ranks) for t in tokens.values()]
        of_rows = torch.cat([torch.empty(0, ranks, dtype=torch.int64), *columns]).t().flatten().to(wanted.device)
        is_kept = pad(wanted, (0, 1))[of_rows]
        rows = rows[is_kept]
        check_rows(destination, rows, self.layers(destination, self.mesh.rank), self.experts)
        return RouteTable.of_rows(of_rows[is_kept], rows, len(wanted))

    def _rows_of_share(self, destination: str, tokens: dict[int, Tensor], received: dict[int, Tensor]) -> Tensor:
        """[R, L, k] int16 received rows, those of each replica padded to the largest share of them."""
        rank = self.mesh.rank
        layers, share = self.layers(destination, rank), self._share(destination, rank)
        sizes, expected, start = {dp_rank: -(-len(t) // share.step) for dp_rank, t in tokens.items()}, {}, 0
        rows = torch.zeros(sum(sizes.values()), len(layers), self.topk, dtype=torch.int16, device=device.device())
        for dp_rank, size in sizes.items():
            of_replica = rows[start : start + len(tokens[dp_rank][share])]
            for sender, sent in self._senders(destination, rank, dp_rank).items():
                expected[sender] = of_replica, [layers.index(layer) for layer in sent]
            start += size
        for sender, routes in received.items():
            of_replica, columns = expected.get(sender, (rows[:0], []))
            shape = len(of_replica), len(columns), self.topk
            if len(routes) != 2 * math.prod(shape):
                raise RuntimeError(
                    f"{destination}: rank {sender} of the rollout sent {len(routes)} bytes of routes, but "
                    f"{2 * math.prod(shape)} are expected: {self.topk} experts of {shape[0]} tokens in MoE layers "
                    f"{[layers[i] for i in columns]}; the two disagree about sequences, their lengths or replicas"
                )
            of_replica[:, columns] = routes.view(torch.int16).view(shape)
        return rows


def _routed_tokens(batch: Batch, dp_assignment: Tensor) -> dict[int, Tensor]:
    """Replica of the other side -> positions in `batch`, on the host, of all tokens but the last of each row of the
    sequences that it holds, too; none for others, whose number grows with the world. `dp_assignment`: [N] of it."""
    host = Batch(sequence_ids=batch.sequence_ids.cpu(), lengths=batch.lengths.cpu())
    dp_ranks, starts = dp_assignment[host.sequence_ids], host.cu_seqlens[:-1]
    is_last = torch.zeros(int(host.lengths.sum()), dtype=torch.bool)
    if batch.row_starts is not None:
        is_last = batch.row_starts.cpu().roll(-1)
    found = {
        dp_rank: expand_ranges(starts[dp_ranks == dp_rank], host.lengths[dp_ranks == dp_rank] - 1)
        for dp_rank in dp_ranks.unique().tolist()
    }
    return {dp_rank: tokens[~is_last[tokens]] for dp_rank, tokens in found.items()}


def check_rows(role: str, rows: Tensor, layers: tuple[int, ...], experts: int):
    """RuntimeError unless every route in rows [R, L, k] is k ascending experts from 0 to `experts` − 1."""
    is_valid = (rows[..., 0] >= 0) & (rows[..., -1] <= experts - 1) & (rows[..., 1:] > rows[..., :-1]).all(-1)
    if is_valid.all():
        return
    invalid = (~is_valid).sum(0).tolist()
    by_layer = ", ".join(f"layer {layer}: {count}" for layer, count in zip(layers, invalid, strict=True) if count)
    row, column = (~is_valid).nonzero()[0].tolist()
    raise RuntimeError(
        f"{role}: of {len(rows)} routes of the rollout in each MoE layer some are not {rows.shape[2]} ascending "
        f"experts from 0 to {experts - 1} ({by_layer}); the first, of layer {layers[column]}, is "
        f"{rows[row, column].tolist()}"
    )
