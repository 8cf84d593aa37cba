"""What layers have instead of attention: a first projection, a recurrence over runs of rows, a last projection."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.kernels.linear import apply_linear
from megarl.mcore.model.decoder_layer import StepPlan, local_layer
from megarl.mcore.parallel.context_parallel import to_heads, to_tokens
from megarl.mcore.recurrence.runs import AnyRuns
from megarl.mcore.recurrence.states import States


class RecurrentMixer(torch.nn.Module):
    """Packed sequences in training, a state of each request in rollout.

    A subclass has `in_proj`, `out_proj`, `in_proj_split_sections` (rows of the parts of the first), and two methods.
    """

    in_proj_split_sections: tuple[int, ...]

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0):
        """What the recurrence reads of rows [T, in_proj rows]; arguments as of `_mixed`."""
        raise NotImplementedError

    def _mixed(
        self, projected: Tensor, runs: AnyRuns, states: States | None, shares: int = 1, share: int = 0
    ) -> Tensor:
        """[T, in_proj rows] -> [T, out_proj columns].

        `shares`, `share`: the heads are one of so many shares of this rank's.
        """
        raise NotImplementedError

    def forward(
        self, hidden_states, attention_mask=None, *, inference_context=None, rotary_pos_emb=None,
        packed_seq_params=None, **_,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and no bias.

        `packed_seq_params` is a `PackedLayout`, `inference_context` a `RecurrentContext`.
        """
        if inference_context is not None:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb))
        projected, _ = self.in_proj(hidden_states)
        layout = packed_seq_params
        if layout.order is None:
            return self.out_proj(self._mixed(projected.squeeze(1), layout.runs, None).unsqueeze(1))
        of_heads = to_heads(projected.squeeze(1), self.in_proj_split_sections, layout.order, layout.cp_group)
        ranks, rank = dist.get_world_size(layout.cp_group), dist.get_rank(layout.cp_group)
        mixed = to_tokens(self._mixed(of_heads, layout.runs, None, ranks, rank), layout.order, layout.cp_group)
        return self.out_proj(mixed.unsqueeze(1))

    _layer = functools.cached_property(local_layer)

    def step(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Same as `forward` for the rows of a step, whose runs continue the states of their requests."""
        projected, _ = apply_linear(self.in_proj, hidden)
        mixed = self._mixed(projected.squeeze(1), plan.runs, plan.states[self._layer])
        if plan.drafted is not None:
            plan.drafted[self._layer] = self._inputs(projected.squeeze(1).float())
        return apply_linear(self.out_proj, mixed.unsqueeze(1))
