"""Routing of one micro-batch on one rank: the routes its MoE layers take, and statistics of them.

A route is the k experts of one token in one MoE layer, in ascending order. A `Routing` travels with its micro-batch to
every layer, in the forward pass and in recomputation. Layers have Megatron's numbers, from 1 over the whole model. A
token counts if another one follows it in its sequence, once in each sequence that shares it. Others, which affect no
log-prob and no value, and padding have no route and are routed live.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ROUTE = -1


@dataclass(frozen=True)
class RoutedTokens:
    """The R tokens of a micro-batch that this rank routes, and where they occur in its N sequences."""

    token_indices: Tensor  # [R] int64 indices among the micro-batch's tokens; from their number on: padding
    uses: Tensor  # [R] int64 sequences in which another token follows the token
    # [P] of each pair of a token, 0 … R − 1, and a sequence that contains it, 0 … N − 1 (N: padding), in the order of
    # the sequences: int64 both, and bool whether another token follows it there.
    occurrences: tuple[Tensor, Tensor, Tensor]
    sequences: int  # N

    @functools.cached_property
    def counted(self) -> Tensor:
        """[R] bool: tokens that another token follows."""
        return self.uses > 0


class Routing:
    """Routes of one micro-batch in this rank's MoE layers, with their load and auxiliary losses."""

    def __init__(
        self, role: str, layers: tuple[int, ...], experts: int, rows: RoutedTokens, replayed: Tensor | None = None
    ):
        """
        Args:
            layers: numbers of this rank's L MoE layers.
            experts: E of each layer.
            rows: the R tokens to route.
            replayed: [R, L, k] int16 routes, a row of `NO_ROUTE` for a token routed live; None: all tokens are.

        Raises:
            RuntimeError: `replayed` is for other tokens or layers.
        """
        self.role, self.layers = role, layers
        self.rows, self.replayed = rows, replayed
        # Global counts of the mini-batch, the denominators of auxiliary losses: tokens that count, and sequences of at
        # least two tokens; 0-dimensional float64. None in passes without an update.
        self.totals: tuple[Tensor, Tensor] | None = None
        if replayed is not None and replayed.shape[:2] != (len(rows.token_indices), len(layers)):
            raise RuntimeError(
                f"{role}: routes of {replayed.shape[0]} tokens in {replayed.shape[1]} layers for "
                f"{len(rows.token_indices)} tokens in MoE layers {list(layers)}"
            )
        self.used: dict[int, Tensor] = {}  # layer -> [R, k] chosen experts
        device = rows.token_indices.device
        # Counted tokens of each expert, and those whose live route differs.
        self.load = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        self.differs = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self.losses: dict[str, Tensor] = {}  # auxiliary losses, summed over the layers

    def choose(self, layer: int, live: Tensor) -> Tensor:
        """Returns the experts to use, [R, k]: the replayed route of a token if it has one, else its live experts.
        `layer`: layer number; `live`: [R, k] int64 experts that the router chose now, ascending in each row."""
        if layer not in self.layers:
            raise RuntimeError(f"{self.role}: no routes for MoE layer {layer}, only for {list(self.layers)}")
        if len(live) != len(self.rows.token_indices):
            raise RuntimeError(
                f"{self.role}: routes of {len(self.rows.token_indices)} tokens for {len(live)} in MoE layer {layer}"
            )
        chosen, index = live, self.layers.index(layer)
        if self.replayed is not None:
            replayed = self.replayed[:, index].long()
            chosen = torch.where(replayed < 0, live, replayed)
        if layer not in self.used:  # else this is a recomputation
            self._record(layer, index, live, chosen)
        return chosen

    def _record(self, layer: int, index: int, live: Tensor, chosen: Tensor):
        uses = self.rows.uses
        self.used[layer] = chosen
        self.load[index].index_add_(0, chosen.flatten(), uses.unsqueeze(1).expand_as(chosen).flatten())
        self.differs[index] += ((live != chosen).any(1) * uses).sum()

    def check(self):
        """Raises RuntimeError if the micro-batch did not pass all layers."""
        missing = [layer for layer in self.layers if layer not in self.used]
        if missing:
            raise RuntimeError(
                f"{self.role}: {len(self.rows.token_indices)} tokens were not routed in MoE layers {missing}, "
                f"only in {sorted(self.used)}"
            )

    def recorded(self, topk: int) -> Tensor:
        """Returns [R, L, topk] int16 routes taken, `NO_ROUTE` at tokens that do not count."""
        rows = self.rows
        if not self.layers:
            return torch.zeros(len(rows.token_indices), 0, topk, dtype=torch.int16, device=rows.token_indices.device)
        routes = torch.stack([self.used[layer] for layer in self.layers], dim=1).to(torch.int16)
        return routes.masked_fill(~rows.counted.view(-1, 1, 1), NO_ROUTE)
