"""What a step of the rollout engine is about: its requests, their cache, which logits are wanted of it."""

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.packing import LEAST_ROWS


class Context(DynamicInferenceContext):
    """Megatron's context; on a CPU a decode step is not rounded up to 64 tokens, which costs more than it saves."""

    TOKEN_ROUNDER = DynamicInferenceContext.TOKEN_ROUNDER if device.has_cuda() else LEAST_ROWS

    @property
    def num_last_token_logits(self) -> int:
        """Rows of `last_token_logits`: pipeline stages agree on it before they pass logits on."""
        return max(super().num_last_token_logits, LEAST_ROWS)

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Hidden states [1, S, H] -> those of each request's last token [≥ N, H], never fewer rows than training."""
        rows = logits.squeeze(0)[self.active_logit_idxs[: super().num_last_token_logits]]
        return torch.cat([rows, rows[:1].expand(LEAST_ROWS - len(rows), -1)]) if len(rows) < LEAST_ROWS else rows

    def update_requests(self, active_requests_mask: Tensor, *args, **kwargs):
        """Moves on to the next step; blocks of requests that ended may be others' behind it."""
        self.kv_block_allocator.take_out(active_requests_mask)
        return super().update_requests(active_requests_mask, *args, **kwargs)
