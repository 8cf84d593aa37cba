"""The routes that a rank holds, and requests for routes.

A route is the k experts of a token in an MoE layer: int16, ascending (arXiv 2510.11370 §3.2: the mask that is
replayed). A sequence's last token has no route, because it passes no router: all k entries are −1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.batch import Batch, expand_ranges
from megarl.mcore.moe.routing import NO_ROUTE


@dataclass(frozen=True)
class RouteTable:
    """Routes of some tokens of a replica's batch in the L MoE layers of this rank."""

    rows: Tensor  # [R, L, k] int16
    index: Tensor  # [T] int64, row of each token of the batch; −1: no route

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


class TokenRuns(NamedTuple):
    """n runs of adjacent tokens, each within one sequence; the fields are the columns of `table()`."""

    sequence_ids: Tensor  # [n] int64
    starts: Tensor  # [n] int64, index of the first token in the sequence
    stops: Tensor  # [n] int64, index after the last token
    lengths: Tensor  # [n] int64, tokens of the whole sequence

    @property
    def counts(self) -> Tensor:
        """[n] int64 tokens in each run."""
        return self.stops - self.starts

    def table(self) -> Tensor:
        """[n, 4] int64, the format in which runs are sent."""
        return torch.stack(self, dim=1)


class RouteRequest(NamedTuple):
    """Tokens whose routes a rank needs, grouped by the rollout's replica: the rows of the future `RouteTable`."""

    runs: list[Tensor]  # for each replica, [n, 4] as in `TokenRuns.table`
    rows: list[int]  # tokens from each replica
    index: Tensor  # type: ignore[assignment]  # [T] int64 as in `RouteTable`; hides tuple.index

    @staticmethod
    def of(
        role: str, layers: tuple[int, ...], batch: Batch, wanted: Tensor, dp_assignment: Tensor, replicas: int
    ) -> "RouteRequest":  # fmt: skip
        """The request of this rank.

        Args:
            role, layers: of this rank, for error messages.
            wanted: [T] bool, tokens whose routes this rank needs.
            dp_assignment: [N] int64, dp rank of the rollout that holds each sequence id.

        Raises:
            RuntimeError: `wanted` contains a sequence's last token, or a sequence that no replica holds.
        """
        edges = pad(wanted.to(torch.int8), (1, 1)).diff()
        first, stop = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        sequence = torch.searchsorted(batch.cu_seqlens, first, right=True) - 1
        offsets = batch.cu_seqlens[sequence]
        runs = TokenRuns(
            sequence_ids=batch.sequence_ids[sequence],
            starts=first - offsets,
            stops=stop - offsets,
            lengths=batch.lengths[sequence],
        )
        dp_assignment = dp_assignment.to(wanted.device)
        _check_request(f"{role}: routes of MoE layers {list(layers)}", runs, len(dp_assignment))
        dp_ranks, order = dp_assignment[runs.sequence_ids].sort(stable=True)
        token_counts = runs.counts[order]
        totals = torch.zeros(2, replicas, dtype=torch.int64, device=wanted.device)
        totals.scatter_add_(1, dp_ranks.expand(2, -1), torch.stack([torch.ones_like(token_counts), token_counts]))
        run_counts, rows = totals.tolist()
        tokens = expand_ranges(first[order], token_counts)
        index = torch.full_like(wanted, NO_ROUTE, dtype=torch.int64)
        index[tokens] = torch.arange(len(tokens), device=tokens.device)
        return RouteRequest(list(runs.table()[order].split(run_counts)), rows, index)


def _check_request(name: str, runs: TokenRuns, sequences: int):
    last, unknown = torch.stack([runs.stops >= runs.lengths, runs.sequence_ids >= sequences]).sum(1).tolist()
    if last:
        raise RuntimeError(
            f"{name} are requested up to a sequence's last token, which has no route, in {last} of {len(runs.starts)} "
            "token runs"
        )
    if unknown:
        raise RuntimeError(
            f"{name} are requested for sequence {int(runs.sequence_ids.max())}, but the rollout's replicas hold 0 to "
            f"{sequences - 1} ({unknown} of {len(runs.starts)} token runs)"
        )


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
