"""Brings routes from the rollout to the ranks that replay them: owner to owner, never through a leader, two bytes each.

A rank asks for the tokens and the MoE layers that its own routers see, each from one rank of the lane that wrote the
sequence. One all-to-all says how many runs of tokens are asked for, one says which, one brings the routes. What a
rank holds itself goes the same way, and over no wire.
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
    """Which rank holds which MoE layers of which role, and who gives them to whom."""

    def __init__(self, mesh: RoleMesh, layers: dict[str, tuple[int, ...]]):
        """Gathers `layers` (by role, of this rank) from all ranks. A collective of the world."""
        self.mesh = mesh
        self._layers = [{} for _ in range(mesh.size)]
        dist.all_gather_object(self._layers, {role: tuple(held) for role, held in layers.items()})
        self._by_layer: list[dict[int, list[int]]] = [{} for _ in mesh[ROLLOUT].replicas]
        for found, dp_rank in zip(self._by_layer, mesh[ROLLOUT].replicas, strict=True):
            for rank in dp_rank:
                for layer in self.layers(ROLLOUT, rank):
                    found.setdefault(layer, []).append(rank)

    @property
    def roles(self) -> list[str]:
        """Roles that take routes."""
        return sorted({role for held in self._layers for role in held} - {ROLLOUT})

    def layers(self, role: str, rank: int) -> tuple[int, ...]:
        """Layers of a role on a rank."""
        return self._layers[rank].get(role, ())

    def check(self, role: str):
        """RuntimeError where a lane of the rollout lacks a layer that the role has."""
        wanted = {layer for rank in self.mesh[role].ranks for layer in self.layers(role, rank)}
        for dp_rank, held in enumerate(self._by_layer):
            missing = sorted(wanted - set(held))
            if missing:
                raise RuntimeError(
                    f"{role}: routes of MoE layers {missing} ({len(missing)} of {len(wanted)}) are on no rank of the "
                    f"rollout's lane {dp_rank}, which has those of layers {sorted(held)}"
                )

    def givers(self, role: str, rank: int, dp_rank: int) -> dict[int, list[int]]:
        """Layers of a rank by the rank of a rollout's lane that gives them: itself, or one of equals, taken in turn."""
        found, turn = {}, self.mesh[role].ranks.index(rank)
        for layer in self.layers(role, rank):
            ranks = self._by_layer[dp_rank][layer]
            giver = rank if rank in ranks else ranks[turn % len(ranks)]
            found.setdefault(giver, []).append(layer)
        return found

    def takers(self, role: str) -> dict[int, list[int]]:
        """Layers that each rank of a role takes from this one."""
        me, dp_rank = self.mesh.rank, self.mesh[ROLLOUT].dp_rank
        if dp_rank is None:
            return {}
        return {rank: self.givers(role, rank, dp_rank).get(me, []) for rank in self.mesh[role].ranks}


class RouteExchange:
    """The way of routes from the rollout to the roles that replay them."""

    def __init__(self, mesh: RoleMesh, layers: dict[str, tuple[int, ...]], topk: int, experts: int):
        """Learns who holds what. A collective of the world.

        Args:
            layers: numbers of the MoE layers that this rank holds in the rollout, in the order in which its batch has
                them, and in each role that replays.
            topk: experts of a token.
            experts: experts of a layer.

        Raises:
            RuntimeError: a lane of the rollout lacks a layer that a role has.
        """
        self.mesh, self.topk, self.experts = mesh, topk, experts
        self.bytes_received = 0  # of routes from other ranks, in all calls
        self._holders = holders = LayerHolders(mesh, layers)
        self._takers, self._givers = {}, {}
        for role in holders.roles:
            holders.check(role)
            replicas = range(len(mesh[ROLLOUT].replicas)) if mesh[role].is_member else ()
            self._givers[role] = [holders.givers(role, mesh.rank, dp_rank) for dp_rank in replicas]
            self._takers[role] = holders.takers(role)

    def send(
        self, source: Batch | None, destination: str, batch: Batch | None, wanted: Tensor | None,
        dp_assignment: dict[str, Tensor],
    ) -> RouteTable | None:  # fmt: skip
        """Routes of the wanted tokens in this rank's layers. A collective of the ranks of rollout and destination.

        Returns None outside the destination; ranks of neither role return at once.

        Args:
            source: this rank's batch of the rollout with `routes`; ignored elsewhere.
            batch: this rank's batch of the destination; ignored elsewhere.
            wanted: [T] bool, tokens of that batch whose routes this rank needs: never a sequence's last.
            dp_assignment: as in `exchange.send`.

        Raises:
            RuntimeError: routes were not recorded, or not one for each token and layer; a sequence is not held, or of
                another length, where its routes are asked for; a route is not k experts. On the rank that sees it.
        """
        here, there = self.mesh[ROLLOUT], self.mesh[destination]
        if not here.is_member and not there.is_member:
            return None
        if here.is_member:
            self._check_source(source)
        group, request = self.mesh.ranks_group(ROLLOUT, destination), None
        if there.is_member:
            layers = self._holders.layers(destination, self.mesh.rank)
            request = RouteRequest.of(destination, layers, batch, wanted, dp_assignment[ROLLOUT], len(here.replicas))
        runs, asked = self._ask(destination, request, group)
        arrived = self._answer(source, destination, request, runs, asked, group)
        return self._table(destination, request, arrived) if there.is_member else None

    def _check_source(self, source: Batch | None):
        layers = list(self._holders.layers(ROLLOUT, self.mesh.rank))
        if not layers:
            return
        if source is None or source.routes is None:
            raise RuntimeError(f"rollout: no routes of MoE layers {layers} were recorded, 0 of {len(layers)} layers")
        wanted = [len(source.tokens), len(layers), self.topk]
        if len(source) and list(source.routes.shape) != wanted:
            raise RuntimeError(
                f"rollout: routes of MoE layers {layers} have shape {list(source.routes.shape)}, and its batch has "
                f"{wanted[0]} tokens, {wanted[1]} layers and {wanted[2]} experts a token"
            )

    def _ask(self, destination: str, request: RouteRequest | None, group) -> tuple[Tensor, list[int]]:
        """Asks those who have the routes; gives what this rank is asked for: [n, 4] runs, and how many by each rank."""
        ranks, where = dist.get_process_group_ranks(group), device.device()
        parts = dict.fromkeys(ranks, torch.empty(0, len(TokenRuns._fields), dtype=torch.int64, device=where))
        if request is not None:
            for runs, givers in zip(request.runs, self._givers[destination], strict=True):
                parts |= dict.fromkeys(givers, runs)
        counts = torch.tensor([len(parts[rank]) for rank in ranks], device=where)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        asked, runs = arriving.tolist(), torch.cat([parts[rank] for rank in ranks])
        arrived = runs.new_empty(sum(asked), runs.shape[1])
        dist.all_to_all_single(arrived, runs, asked, counts.tolist(), group=group)
        return arrived, asked

    def _answer(
        self,
        source: Batch | None,
        destination: str,
        request: RouteRequest | None,
        runs: Tensor,
        asked: list[int],
        group,
    ) -> dict[int, Tensor]:
        """Gives the routes asked for, as bytes; those that come from each rank, [tokens · layers · k] int16."""
        ranks, expected = dist.get_process_group_ranks(group), {}
        if request is not None:
            for rows, givers in zip(request.rows, self._givers[destination], strict=True):
                expected |= {rank: 2 * rows * len(layers) * self.topk for rank, layers in givers.items()}
        leaving = self._routes(source, destination, runs, asked, ranks)
        sizes = [expected.get(rank, 0) for rank in ranks]
        arriving = torch.empty(sum(sizes), dtype=torch.uint8, device=runs.device)
        dist.all_to_all_single(
            arriving, torch.cat(leaving).view(torch.uint8), sizes, [part.nbytes for part in leaving], group=group
        )
        self.bytes_received += sum(sizes) - expected.get(self.mesh.rank, 0)
        return dict(zip(ranks, arriving.view(torch.int16).split([size // 2 for size in sizes]), strict=True))

    def _routes(
        self, source: Batch | None, destination: str, runs: Tensor, asked: list[int], ranks: list[int]
    ) -> list[Tensor]:
        """What each rank gets: routes of the tokens that it asked for, in the layers that it takes from here."""
        nothing = torch.empty(0, dtype=torch.int16, device=runs.device)
        if not len(runs):
            return [nothing] * len(ranks)
        wanted = TokenRuns(*runs.t().contiguous())
        sequence = self._find(source, destination, wanted)
        places = expand_ranges(source.cu_seqlens[sequence] + wanted.starts, wanted.counts)
        bounds = torch.tensor([0, *accumulate(asked)], device=runs.device)
        tokens = pad(wanted.counts.cumsum(0), (1, 0))[bounds].diff().tolist()
        held, takers, found = self._holders.layers(ROLLOUT, self.mesh.rank), self._takers[destination], []
        for rank, part in zip(ranks, places.split(tokens), strict=True):
            columns = [held.index(layer) for layer in takers.get(rank, ())]
            found.append(source.routes[part[:, None], columns].flatten() if len(part) else nothing)
        return found

    def _find(self, source: Batch, destination: str, wanted: TokenRuns) -> Tensor:
        """[n] places of the runs' sequences in the rollout's batch."""
        layers = list(self._holders.layers(ROLLOUT, self.mesh.rank))
        other = ~torch.isin(wanted.sequence_ids, source.sequence_ids)
        if other.any():
            raise RuntimeError(
                f"rollout: {destination} asks for routes of MoE layers {layers} of {int(other.sum())} runs of tokens, "
                f"of {len(other)}, of sequences that this lane does not hold: it has {len(source)}, and not "
                f"{int(wanted.sequence_ids[other][0])}"
            )
        place = torch.searchsorted(source.sequence_ids, wanted.sequence_ids)
        other = source.lengths[place] != wanted.lengths
        if other.any():
            here, there = int(source.lengths[place][other][0]), int(wanted.lengths[other][0])
            raise RuntimeError(
                f"rollout: routes of MoE layers {layers} for {destination}: sequence "
                f"{int(wanted.sequence_ids[other][0])} has {here} rows here and {there} tokens there "
                f"({int(other.sum())} of {len(other)} runs of tokens)"
            )
        return place

    def _table(self, destination: str, request: RouteRequest, arrived: dict[int, Tensor]) -> RouteTable:
        layers = self._holders.layers(destination, self.mesh.rank)
        shape = (sum(request.rows), len(layers), self.topk)
        rows = torch.empty(shape, dtype=torch.int16, device=request.index.device)
        for part, givers in zip(rows.split(request.rows), self._givers[destination], strict=True):
            for rank, taken in givers.items():
                columns = [layers.index(layer) for layer in taken]
                part[:, columns] = arrived[rank].view(len(part), len(taken), self.topk)
        check_rows(destination, rows, layers, self.experts)
        return RouteTable(rows, request.index)
