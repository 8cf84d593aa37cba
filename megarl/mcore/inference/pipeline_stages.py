"""Pipeline stages of an engine's step: hidden states go from stage to stage, what the last one computes to all of them.

Unlike Megatron's, nothing here waits for the device, and nothing rounds logits to 16 bits. Each stage computes between
these calls, so its kernels can be a CUDA graph.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore import device


class PipelineStages:
    """This rank's stage of a model, and its neighbours; a model of one stage sends nothing."""

    def __init__(self, wrapper):
        """`wrapper`: Megatron's inference wrapper of the model."""
        self._group, self._model, self._dtype = wrapper.pp_group, wrapper.model, wrapper.pipeline_communication_dtype
        self._tensor_ranks = wrapper.tp_size if wrapper.sequence_parallel else 1
        self._rank, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def is_last(self) -> bool:
        """Whether this stage has the output head."""
        return self._rank == self.count - 1

    def input_memory(self, tokens: int) -> Tensor | None:
        """Memory for the hidden states that a stage after the first one reads; None: it is the first.

        `tokens`: T. Its shape is [T, 1, H], with sequence parallelism [T/tp, 1, H].
        """
        shape = tokens // self._tensor_ranks, 1, self._model.config.hidden_size
        return torch.empty(shape, dtype=self._dtype, device=device.device()) if self._rank else None

    def receive(self, hidden: Tensor | None):
        """Has the model read the hidden states of the stage before this one from `hidden`, and receives them there."""
        if self.count > 1:
            self._model.set_input_tensor(hidden)
        if hidden is not None:
            self._exchange(dist.irecv, hidden, self._rank - 1)

    def of_last(self, computed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns on all stages what the last one has computed, of a known shape and dtype.

        `computed`: on other stages the hidden states for the next one.
        """
        if self.count == 1:
            return computed
        if self.is_last:
            computed = computed.to(dtype).contiguous()
        else:
            self._exchange(dist.isend, computed.to(self._dtype), self._rank + 1)
            computed = torch.empty(shape, dtype=dtype, device=device.device())
        dist.broadcast(computed, group=self._group, group_src=self.count - 1)
        return computed

    def _exchange(self, operation, tensor: Tensor, peer: int):
        # As a batch, which runs over the group's own communicator, as in training; a single one would make another.
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=self._group, group_peer=peer)]):
            work.wait()
