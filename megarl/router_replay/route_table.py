"""Routes of a rank: the k experts that each token took in each MoE layer held here, and which tokens are wanted.

A route is k experts in ascending order, int16 (arXiv 2510.11370 §3.2: the mask that is replayed). A sequence's last
token has none, since no router is asked about it: −1 in all k places.
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
    """Routes of some tokens of a lane's batch in the L MoE layers of this rank."""

    rows: Tensor  # [R, L, k] int16
    index: Tensor  # [T] int64, row of each token of the batch; −1: none

    def of(self, tokens: Tensor) -> Tensor:
        """[n, L, k] int16 routes of tokens, −1 where there are none.

        Args:
            tokens: [n] int64 places in the batch; T and more: padding.
        """
        if not len(self.rows):
            return self.rows.new_full((len(tokens), *self.rows.shape[1:]), NO_ROUTE)
        last = len(self.index) - 1
        row = torch.where(tokens > last, NO_ROUTE, self.index[tokens.clamp(max=last)])
        return torch.where((row < 0)[:, None, None], NO_ROUTE, self.rows[row.clamp(min=0)])


class TokenRuns(NamedTuple):
    """n runs of neighbouring tokens, each within a sequence; its tensors are the columns of `table()`."""

    sequence_ids: Tensor  # [n] int64
    starts: Tensor  # [n] int64, first token, counted from the sequence's first
    stops: Tensor  # [n] int64, the token behind the last
    lengths: Tensor  # [n] int64, tokens of the whole sequence

    @property
    def counts(self) -> Tensor:
        """[n] int64 tokens of each run."""
        return self.stops - self.starts

    def table(self) -> Tensor:
        """[n, 4] int64, as it is sent."""
        return torch.stack(self, dim=1)


class RouteRequest(NamedTuple):
    """Wanted tokens of a batch in the order of the rollout's lanes that wrote them: the rows of the table to come."""

    runs: list[Tensor]  # of each lane, [n, 4] as `TokenRuns.table`
    rows: list[int]  # tokens of each lane
    index: Tensor  # [T] int64 as in `RouteTable`

    @staticmethod
    def of(
        role: str, layers: tuple[int, ...], batch: Batch, wanted: Tensor, dp_assignment: Tensor, replicas: int
    ) -> "RouteRequest":  # fmt: skip
        """The request of a rank of a role.

        Args:
            role, layers: of the rank, for messages.
            wanted: [T] bool, tokens whose routes this rank needs.
            dp_assignment: [number of sequences] int64, lane of the rollout that holds each sequence id.

        Raises:
            RuntimeError: a sequence's last token, or a sequence that no lane holds, is wanted.
        """
        edges = pad(wanted.to(torch.int8), (1, 1)).diff()
        first, behind = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        sequence = torch.searchsorted(batch.cu_seqlens, first, right=True) - 1
        offsets = batch.cu_seqlens[sequence]
        runs = TokenRuns(batch.sequence_ids[sequence], first - offsets, behind - offsets, batch.lengths[sequence])
        dp_assignment = dp_assignment.to(wanted.device)
        _check_request(f"{role}: routes of MoE layers {list(layers)}", runs, len(dp_assignment))
        dp_rank, order = dp_assignment[runs.sequence_ids].sort(stable=True)
        counts = runs.counts[order]
        sizes = torch.zeros(2, replicas, dtype=torch.int64, device=wanted.device)
        sizes.scatter_add_(1, dp_rank.expand(2, -1), torch.stack([torch.ones_like(counts), counts]))
        number, rows = sizes.tolist()
        places = expand_ranges(first[order], counts)
        index = torch.full_like(wanted, NO_ROUTE, dtype=torch.int64)
        index[places] = torch.arange(len(places), device=places.device)
        return RouteRequest(list(runs.table()[order].split(number)), rows, index)


def _check_request(name: str, runs: TokenRuns, sequences: int):
    last, unknown = torch.stack([runs.stops >= runs.lengths, runs.sequence_ids >= sequences]).sum(1).tolist()
    if last:
        raise RuntimeError(
            f"{name} are wanted up to a sequence's last token, which has none, in {last} of {len(runs.starts)} runs of "
            "tokens"
        )
    if unknown:
        raise RuntimeError(
            f"{name} are wanted of sequence {int(runs.sequence_ids.max())}, and the rollout's lanes hold 0 to "
            f"{sequences - 1} ({unknown} of {len(runs.starts)} runs of tokens)"
        )


def check_rows(role: str, rows: Tensor, layers: tuple[int, ...], experts: int):
    """RuntimeError unless every route of rows [R, L, k] is k ascending numbers from 0 to `experts` − 1."""
    fine = (rows[..., 0] >= 0) & (rows[..., -1] <= experts - 1) & (rows[..., 1:] > rows[..., :-1]).all(-1)
    if fine.all():
        return
    bad = (~fine).sum(0).tolist()
    found = ", ".join(f"layer {layer}: {count}" for layer, count in zip(layers, bad, strict=True) if count)
    number, place = (~fine).nonzero()[0].tolist()
    raise RuntimeError(
        f"{role}: of {len(rows)} routes of the rollout in each MoE layer some are not {rows.shape[2]} ascending "
        f"experts from 0 to {experts - 1} ({found}); the first, of layer {layers[place]}, is "
        f"{rows[number, place].tolist()}"
    )
