"""What the routers of a model do with one micro-batch on one rank: which routes they take, and what is seen of it.

A route is the k experts of one token in one MoE layer, in ascending order. A `Routing` travels with its micro-batch to
every layer, in the forward pass and again where backward recomputes it: both take the same routes, and no queue of the
process can be out of step. Layers are called by Megatron's number, from 1 over the whole model.

A token counts where another one follows it in its sequence: what stands at the last token reaches no log-prob and no
value, and the rollout never ran it. Tokens that do not count, padding too, have no route and are routed live.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_ROUTE = -1


@dataclass(frozen=True)
class RoutedTokens:
    """The R tokens of a micro-batch that this rank's routers see."""

    places: Tensor  # [R] int64 places in the micro-batch's stream; its number of tokens and more: padding
    counted: Tensor  # [R] bool, tokens that another one follows
    sequence: Tensor  # [R] int64 sequence of each token, 0 … N − 1; N: padding
    sequences: int  # N of the micro-batch


@dataclass(frozen=True)
class MinibatchCounts:
    """Global counts of the mini-batch, by which auxiliary losses are divided: 0-dimensional float64 tensors."""

    tokens: Tensor  # that count
    sequences: Tensor  # of at least two tokens


class Routing:
    """Routes of one micro-batch in this rank's MoE layers."""

    def __init__(
        self, role: str, layers: tuple[int, ...], experts: int, rows: RoutedTokens, replayed: Tensor | None = None,
        totals: MinibatchCounts | None = None,
    ):  # fmt: skip
        """
        Args:
            layers: numbers of this rank's L MoE layers.
            experts: E of each layer.
            rows: the R tokens.
            replayed: [R, L, k] int16, a row of `NO_ROUTE` for a token that is routed live; None: all are.
            totals: of the mini-batch; None where nothing is learnt.

        Raises:
            RuntimeError: routes for other tokens or layers than there are.
        """
        self.role, self.layers, self.rows, self.replayed, self.totals = role, layers, rows, replayed, totals
        if replayed is not None and replayed.shape[:2] != (len(rows.places), len(layers)):
            raise RuntimeError(
                f"{role}: routes of {replayed.shape[0]} tokens in {replayed.shape[1]} layers for {len(rows.places)} "
                f"tokens in MoE layers {list(layers)}"
            )
        self.used: dict[int, Tensor] = {}  # layer -> [R, k] experts that worked
        device = rows.places.device
        self.load = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)  # counted tokens by expert
        self.differs = torch.zeros(len(layers), dtype=torch.int64, device=device)  # counted tokens with other live ones
        self.losses: dict[str, Tensor] = {}  # auxiliary losses, summed over the layers

    def choose(self, layer: int, live: Tensor) -> Tensor:
        """The experts that work: replayed where there is a route, else those that the router chose just now.

        Args:
            layer: number of the layer.
            live: [R, k] int64, ascending in each row.
        """
        if layer not in self.layers:
            raise RuntimeError(f"{self.role}: no routes for MoE layer {layer}; there are some for {list(self.layers)}")
        if len(live) != len(self.rows.places):
            raise RuntimeError(
                f"{self.role}: routes of {len(self.rows.places)} tokens for {len(live)} in MoE layer {layer}"
            )
        chosen, place = live, self.layers.index(layer)
        if self.replayed is not None:
            wanted = self.replayed[:, place].long()
            chosen = torch.where(wanted < 0, live, wanted)
        if layer not in self.used:  # else backward recomputes it
            self._note(layer, place, live, chosen)
        return chosen

    def _note(self, layer: int, place: int, live: Tensor, chosen: Tensor):
        counted = self.rows.counted.unsqueeze(1)
        self.used[layer] = chosen
        self.load[place].index_add_(0, chosen.flatten(), counted.expand_as(chosen).flatten().long())
        self.differs[place] += ((live != chosen) & counted).any(1).sum()

    def check(self):
        """Raises RuntimeError where the micro-batch did not pass all layers."""
        missing = [layer for layer in self.layers if layer not in self.used]
        if missing:
            raise RuntimeError(
                f"{self.role}: {len(self.rows.places)} tokens were not routed in MoE layers {missing}, "
                f"but in {sorted(self.used)}"
            )

    def recorded(self, topk: int) -> Tensor:
        """[R, L, topk] int16 routes that were taken, `NO_ROUTE` at tokens that do not count."""
        rows = self.rows
        if not self.layers:
            return torch.zeros(len(rows.places), 0, topk, dtype=torch.int16, device=rows.places.device)
        routes = torch.stack([self.used[layer] for layer in self.layers], dim=1).to(torch.int16)
        return routes.masked_fill(~rows.counted.view(-1, 1, 1), NO_ROUTE)
