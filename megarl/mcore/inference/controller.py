"""The controller of an engine's steps: its pipeline stages, its sampling, and which requests end.

Hidden states go from stage to stage, what the last one computes to all of them. Unlike Megatron's, nothing here waits
for the device, and nothing rounds logits to 16 bits. Each stage computes between these calls, so its kernels can be a
CUDA graph.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.inference.sampling.base import Sampling
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.inference.end_tokens import NO_TOKEN
from megarl.mcore.kernels.linear import logits_dtype


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
        """Memory for the hidden states that a stage after the first one reads; None: it is the first. `tokens`: T. Its
        shape is [T, 1, H], with sequence parallelism [T/tp, 1, H]."""
        shape = tokens // self._tensor_ranks, 1, self._model.config.hidden_size
        return torch.empty(shape, dtype=self._dtype, device=device.device()) if self._rank else None

    def receive(self, hidden: Tensor | None):
        """Has the model read the hidden states of the stage before this one from `hidden`, and receives them there."""
        if self.count > 1:
            self._model.set_input_tensor(hidden)
        if hidden is not None:
            self._exchange(dist.irecv, hidden, self._rank - 1)

    def of_last(self, computed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns on all stages what the last one has `computed`, others hidden states; of a known shape and dtype."""
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


class Controller(TextGenerationController):
    """Ends a request at any of its `EndTokens`, and makes no text of tokens."""

    # The part of the layer of multi-token prediction in `dummy_forward`; None: no layer.
    predict_for_others: Callable[[], None] | None = None

    def __init__(self, wrapper, sampling: Sampling):
        """`wrapper`: Megatron's, of the model; `sampling`: takes the place of Megatron's own."""
        super().__init__(wrapper, tokenizer=None)
        self.sampling = self._sampling = sampling
        self.stages = PipelineStages(wrapper)

    @staticmethod
    def detokenize(*_, **__) -> str:
        """Returns no text; Megatron's engine asks for that of each finished request."""
        return ""

    def _dynamic_step_forward_logits(self, input_ids: Tensor, position_ids: Tensor):
        """Same as Megatron's, by `PipelineStages`."""
        if self.stages.count == 1:
            return super()._dynamic_step_forward_logits(input_ids, position_ids)
        inputs = {"tokens": input_ids, "position_ids": position_ids, "attention_mask": None}
        forward = self.inference_wrapped_model.forward_pass_without_pipeline_parallel
        self._all_logits_cuda = self.across_stages(inputs, forward)
        return None

    def across_stages(self, inputs: dict, forward: Callable[[dict], Tensor]) -> Tensor:
        """Logits [1, N, V] of a step on all pipeline stages; `forward` computes this stage's part of it."""
        stages = self.stages
        stages.receive(stages.input_memory(inputs["tokens"].shape[1]))
        shape = 1, self.inference_wrapped_model.inference_context.num_last_token_logits, self.vocab_size
        return stages.of_last(forward(inputs), shape, logits_dtype(self.model_config))

    def _run_dummy_serial_mtp_forward(self):
        """Same as Megatron's, for megarl's layer."""
        if self.predict_for_others is not None:
            self.predict_for_others()

    def _transfer_samples_to_cpu(self, active_request_count: int):
        """Same as Megatron's; then sets each request's own end token, which is compared next."""
        tokens, speculative = super()._transfer_samples_to_cpu(active_request_count)
        context = self.inference_wrapped_model.inference_context
        ends = torch.where(context.end_tokens.contains(tokens, *context.sampled_rows()), tokens, NO_TOKEN)
        context.active_request_metadata["termination_id"][:active_request_count] = ends
        return tokens, speculative
