"""The routes that a rank holds.

A route is the k experts of a token in an MoE layer: int16, ascending (arXiv 2510.11370 §3.2: the mask that is
replayed). A sequence's last token has no route, because it passes no router: all k entries are −1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.mcore.moe.routing import NO_ROUTE


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
        """[n, L, k] int16 routes of tokens; −1 for tokens without a route.

        Args:
            tokens: [n] int64 positions in the batch; T and above are padding.
        """
        if not len(self.rows):
            return self.rows.new_full((len(tokens), *self.rows.shape[1:]), NO_ROUTE)
        last = len(self.index) - 1
        row = torch.where(tokens > last, NO_ROUTE, self.index[tokens.clamp(max=last)])
        return torch.where((row < 0)[:, None, None], NO_ROUTE, self.rows[row.clamp(min=0)])


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
