"""Sends routes from the rollout to the ranks that replay them, directly between ranks, with two bytes per expert.

A rank requests the tokens and the MoE layers that its own routers see, from ranks of the replica that generated the
sequence. One all-to-all exchanges the number of requested token runs, one the runs, and one the routes. Routes that a
rank holds itself take the same path without network traffic.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megarl.batch import Batch, expand_ranges
from megarl.comm.role_mesh import RoleMesh
from megarl.mcore import device
from megarl.router_replay.route_table import RouteRequest, RouteTable, TokenRuns, check_rows

ROLLOUT = "rollout"


class LayerHolders:
    """Which rank holds which MoE layers of which role, and which rank sends which layers to which."""

    def __init__(self, mesh: RoleMesh, layers: dict[str, tuple[int, ...]]):
        """Gathers `layers` (by role, of this rank) from all ranks. A collective of the world."""
        self.mesh = mesh
        self._layers = [{} for _ in range(mesh.size)]
        dist.all_gather_object(self._layers, {role: tuple(held) for role, held in layers.items()})
        self._by_layer: list[dict[int, list[int]]] = [{} for _ in mesh[ROLLOUT].replicas]
        for by_layer, ranks in zip(self._by_layer, mesh[ROLLOUT].replicas, strict=True):
            for rank in ranks:
                for layer in self.layers(ROLLOUT, rank):
                    by_layer.setdefault(layer, []).append(rank)

    @property
    def roles(self) -> list[str]:
        """Roles that replay routes."""
        return sorted({role for held in self._layers for role in held} - {ROLLOUT})

    def layers(self, role: str, rank: int) -> tuple[int, ...]:
        """MoE layers of a role on a rank."""
        return self._layers[rank].get(role, ())

    def check(self, role: str):
        """RuntimeError if a replica of the rollout lacks a layer that the role has."""
        wanted = {layer for rank in self.mesh[role].ranks for layer in self.layers(role, rank)}
        for dp_rank, held in enumerate(self._by_layer):
            missing = sorted(wanted - set(held))
            if missing:
                raise RuntimeError(
                    f"{role}: routes of MoE layers {missing} ({len(missing)} of {len(wanted)}) are on no rank of the "
                    f"rollout's replica {dp_rank}, which has layers {sorted(held)}"
                )

    def senders(self, role: str, rank: int, dp_rank: int) -> dict[int, list[int]]:
        """Sending rank in the rollout's replica `dp_rank` -> layers that it sends to `rank`.

        A rank sends to itself where it can; otherwise the holders of a layer share the receivers round-robin.
        """
        senders, index = {}, self.mesh[role].ranks.index(rank)
        for layer in self.layers(role, rank):
            holders = self._by_layer[dp_rank][layer]
            sender = rank if rank in holders else holders[index % len(holders)]
            senders.setdefault(sender, []).append(layer)
        return senders

    def receivers(self, role: str) -> dict[int, list[int]]:
        """Rank of a role -> layers that this rank sends to it."""
        this_rank, dp_rank = self.mesh.rank, self.mesh[ROLLOUT].dp_rank
        if dp_rank is None:
            return {}
        return {rank: self.senders(role, rank, dp_rank).get(this_rank, []) for rank in self.mesh[role].ranks}


class RouteExchange:
    """Transfers routes from the rollout to the roles that replay them."""

    def __init__(self, mesh: RoleMesh, layers: dict[str, tuple[int, ...]], topk: int, experts: int):
        """Plans senders and receivers. A collective of the world.

        Args:
            layers: role -> numbers of the MoE layers that this rank holds; those of the rollout in the order in which
                its batch has the routes.
            topk: experts per token.
            experts: experts per layer.

        Raises:
            RuntimeError: a replica of the rollout lacks a layer that a role has.
        """
        self.mesh = mesh
        self.topk, self.experts = topk, experts
        self.bytes_received = 0  # of routes from other ranks, in all calls
        self._holders = holders = LayerHolders(mesh, layers)
        self._receivers, self._senders = {}, {}
        for role in holders.roles:
            holders.check(role)
            dp_ranks = range(len(mesh[ROLLOUT].replicas)) if mesh[role].is_member else ()
            self._senders[role] = [holders.senders(role, mesh.rank, dp_rank) for dp_rank in dp_ranks]
            self._receivers[role] = holders.receivers(role)

    def send(
        self, source: Batch | None, destination: str, batch: Batch | None, wanted: Tensor | None,
        dp_assignment: dict[str, Tensor],
    ) -> RouteTable | None:  # fmt: skip
        """The routes of the wanted tokens in this rank's layers; None outside the destination.

        A collective of the ranks of rollout and destination; others return at once.

        Args:
            source: this rank's batch in the rollout with `routes`; ignored elsewhere.
            batch: this rank's batch in the destination; ignored elsewhere.
            wanted: [T] bool, tokens of `batch` whose routes this rank needs; never the last of a sequence.
            dp_assignment: as in `exchange.send`.

        Raises:
            RuntimeError: routes were not recorded for every token and layer; a requested sequence is not held, or has
                another length; a route is not k ascending experts. Raised only on the rank that detects it.
        """
        sender, receiver = self.mesh[ROLLOUT], self.mesh[destination]
        if not sender.is_member and not receiver.is_member:
            return None
        if sender.is_member:
            self._check_source(source)
        group, request = self.mesh.channel(f"routes/{destination}"), None
        if receiver.is_member:
            layers = self._holders.layers(destination, self.mesh.rank)
            request = RouteRequest.of(destination, layers, batch, wanted, dp_assignment[ROLLOUT], len(sender.replicas))
        runs, counts = self._exchange_requests(destination, request, group)
        received = self._exchange_routes(source, destination, request, runs, counts, group)
        return self._table(destination, request, received) if receiver.is_member else None

    def _check_source(self, source: Batch | None):
        layers = list(self._holders.layers(ROLLOUT, self.mesh.rank))
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

    def _exchange_requests(
        self, destination: str, request: RouteRequest | None, group
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        """Sends this rank's requests. Returns those received: [n, 4] runs, and how many come from each rank."""
        ranks = dist.get_process_group_ranks(group)
        none = torch.empty(0, len(TokenRuns._fields), dtype=torch.int64, device=device.device())
        by_rank = dict.fromkeys(ranks, none)
        if request is not None:
            for runs, senders in zip(request.runs, self._senders[destination], strict=True):
                by_rank |= dict.fromkeys(senders, runs)
        sent_counts = torch.tensor([len(by_rank[rank]) for rank in ranks], device=device.device())
        counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(counts, sent_counts, group=group)
        counts, runs = counts.tolist(), torch.cat([by_rank[rank] for rank in ranks])
        received = runs.new_empty(sum(counts), runs.shape[1])
        dist.all_to_all_single(received, runs, counts, sent_counts.tolist(), group=group)
        return received, counts

    def _exchange_routes(
        self, source: Batch | None, destination: str, request: RouteRequest | None, runs: Tensor, counts: list[int],
        group,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Sends the requested routes as bytes. Returns those received by rank, [tokens · layers · k] int16."""
        ranks, expected = dist.get_process_group_ranks(group), {}
        if request is not None:
            for rows, senders in zip(request.rows, self._senders[destination], strict=True):
                expected |= {rank: 2 * rows * len(layers) * self.topk for rank, layers in senders.items()}
        routes = self._requested_routes(source, destination, runs, counts, ranks)
        payload, sent_sizes = torch.cat(routes).view(torch.uint8), [of_rank.nbytes for of_rank in routes]
        sizes = [expected.get(rank, 0) for rank in ranks]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=runs.device)
        dist.all_to_all_single(received, payload, sizes, sent_sizes, group=group)
        self.bytes_received += sum(sizes) - expected.get(self.mesh.rank, 0)
        return dict(zip(ranks, received.view(torch.int16).split([size // 2 for size in sizes]), strict=True))

    def _requested_routes(
        self, source: Batch | None, destination: str, runs: Tensor, counts: list[int], ranks: list[int]
    ) -> list[Tensor]:
        """For each rank the routes of the tokens that it requested, in the layers that this rank sends to it."""
        empty = torch.empty(0, dtype=torch.int16, device=runs.device)
        if not len(runs):
            return [empty] * len(ranks)
        wanted = TokenRuns(*runs.t().contiguous())
        sequence = self._positions(source, destination, wanted)
        tokens = expand_ranges(source.cu_seqlens[sequence] + wanted.starts, wanted.counts)
        bounds = torch.tensor([0, *accumulate(counts)], device=runs.device)
        token_counts = pad(wanted.counts.cumsum(0), (1, 0))[bounds].diff().tolist()
        held, routes = self._holders.layers(ROLLOUT, self.mesh.rank), []
        for rank, rows in zip(ranks, tokens.split(token_counts), strict=True):
            columns = [held.index(layer) for layer in self._receivers[destination].get(rank, ())]
            routes.append(source.routes[rows[:, None], columns].flatten() if len(rows) else empty)
        return routes

    def _positions(self, source: Batch, destination: str, wanted: TokenRuns) -> Tensor:
        """[n] positions of the runs' sequences in the rollout's batch."""
        layers = list(self._holders.layers(ROLLOUT, self.mesh.rank))
        is_bad = ~torch.isin(wanted.sequence_ids, source.sequence_ids)
        if is_bad.any():
            raise RuntimeError(
                f"rollout: {destination} requests routes of MoE layers {layers} for sequence "
                f"{int(wanted.sequence_ids[is_bad][0])}, which is not among the {len(source)} of this replica "
                f"({int(is_bad.sum())} of {len(is_bad)} token runs)"
            )
        positions = torch.searchsorted(source.sequence_ids, wanted.sequence_ids)
        is_bad = source.lengths[positions] != wanted.lengths
        if is_bad.any():
            held, expected = int(source.lengths[positions][is_bad][0]), int(wanted.lengths[is_bad][0])
            raise RuntimeError(
                f"rollout: routes of MoE layers {layers} for {destination}: sequence "
                f"{int(wanted.sequence_ids[is_bad][0])} has {held} tokens in the rollout and {expected} in "
                f"{destination} ({int(is_bad.sum())} of {len(is_bad)} token runs)"
            )
        return positions

    def _table(self, destination: str, request: RouteRequest, received: dict[int, Tensor]) -> RouteTable:
        layers = self._holders.layers(destination, self.mesh.rank)
        shape = (sum(request.rows), len(layers), self.topk)
        rows = torch.empty(shape, dtype=torch.int16, device=request.index.device)
        for of_replica, senders in zip(rows.split(request.rows), self._senders[destination], strict=True):
            for rank, sent in senders.items():
                columns = [layers.index(layer) for layer in sent]
                of_replica[:, columns] = received[rank].view(len(of_replica), len(sent), self.topk)
        check_rows(destination, rows, layers, self.experts)
        return RouteTable(rows, request.index)
