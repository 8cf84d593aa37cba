"""Several end tokens: Megatron's engine compares each sampled token with a single one per request."""

from collections.abc import Callable

import torch
from megatron.core.inference.sampling.base import Sampling
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor

from megarl.mcore.inference.forced_tokens import ForcedTokens
from megarl.mcore.inference.pipeline_stages import PipelineStages
from megarl.mcore.inference.stop_states import StopStates
from megarl.mcore.kernels.linear import logits_dtype

NO_TOKEN = -1  # an id that is never sampled


class EndTokens:
    """The ids that end a response; may be none. A request may have its own ones instead. Stop strings end it, too."""

    def __init__(self, ids: tuple[int, ...], stops: StopStates):
        self.ids, self.stops = frozenset(ids), stops
        self.forced: ForcedTokens | None = None  # end nothing
        self._tensor = torch.tensor(sorted(ids), dtype=torch.int64)
        self._own: dict[int, frozenset[int]] = {}  # by request id

    def set_own(self, request_id: int, ids: tuple[int, ...] | None):
        """Gives a request its own end tokens; None: the common ones."""
        self._own.pop(request_id, None)
        if ids is not None and frozenset(ids) != self.ids:
            self._own[request_id] = frozenset(ids)

    def clear(self):
        """Forgets the own ones of all requests."""
        self._own.clear()
        self.stops.clear()

    def of(self, request_id: int) -> frozenset[int]:
        """The end tokens of a request."""
        return self._own.get(request_id, self.ids)

    def contains(self, tokens: Tensor, request_ids: Tensor, positions: Tensor) -> Tensor:
        """Whether each of some tokens [n] on the host ends its request; `request_ids` [n], `positions` [n] in their
        sequences."""
        if not self._own:
            found = torch.isin(tokens, self._tensor)
        else:
            pairs = zip(tokens.tolist(), request_ids.tolist(), strict=True)
            found = torch.tensor([token in self.of(request_id) for token, request_id in pairs], dtype=torch.bool)
        if self.stops:
            found |= torch.tensor(self.stops.completes(tokens.tolist(), request_ids.tolist()), dtype=torch.bool)
        return found & ~self.forced.are_forced(request_ids, positions) if self.forced else found

    def have_ended(self, request_id: int, tokens: list[int]) -> bool:
        """Whether one of them, or a stop string, has ended a response of these tokens."""
        if not tokens or tokens[-1] in self.of(request_id):
            return bool(tokens)
        return self.stops.have_ended(request_id, tokens)


class EndTokensController(TextGenerationController):
    """Megarl's controller: ends a request at any of its `EndTokens`, and makes no text of tokens."""

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
