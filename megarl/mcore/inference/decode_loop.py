"""Megatron's inference engine with a fast path for steps in which every request only decodes one more token.

Most steps of a rollout are such steps: no request joins or ends. Megatron's step handles all of these cases with
an event loop, per-request metadata and tensors of changes. With small layers, that takes a sixth of the step's time.
"""

import torch
import torch.distributed as dist
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megarl.mcore import TRACKERS, absent
from megarl.mcore.inference import admission
from megarl.mcore.inference.device_decode import DeviceDecode
from megarl.observe import activity

with absent(TRACKERS):
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState


class DecodeLoopEngine(DynamicInferenceEngine):
    """Generates the same tokens, log-probs and routes as Megatron's engine, to the last bit."""

    def __init__(self, controller, context):
        super().__init__(controller, context)
        self.is_coupled = dist.get_world_size(self.pg_collection.ep) > 1  # with replicas that share experts
        self.device_decode = DeviceDecode(self)

    def add_request(self, request_id: int, prompt: list[int], sampling_params=None):
        """Same as Megatron's, but the prompt stays in the host's memory, where steps are planned without waits."""
        c, tokens = self.context, torch.tensor(prompt, dtype=torch.int64)
        if self.controller.inference_wrapped_model.model.images is None and (tokens < 0).any():
            raise RuntimeError("a prompt has rows of images, and this model has no store of them")
        if c.image_positions is not None:
            c.image_positions.begin(request_id, tokens)
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=tokens,
            sampling_params=sampling_params,
            block_size_tokens=c.block_size_tokens,
            enable_prefix_caching=c.enable_prefix_caching,
        )
        return self._add_request(request)

    # Requests of the previous step, in the context's order, while steps only decode.
    _decoding_requests: list | None = None
    # Rows of the next step on each replica that shares experts with this one; None: they have different numbers.
    agreed_rows: int | None = None

    def step_modern(self) -> dict:
        """Runs one step of all requests; returns the finished requests under "finished_request_records"."""
        activity.tick()
        if not self._only_decodes:
            self._forget_requests()
            return super().step_modern()
        rows = self.agreed_rows if self.is_coupled else self.device_rows
        return self._end_step(*(self._decode() if rows is None else self.device_decode.run(rows)))

    @property
    def device_rows(self) -> int | None:
        """Rows that the next step of this replica has at least if the device plans it; None: the host does."""
        return self.device_decode.rows(self.context.total_request_count) if self._only_decodes else None

    def _forget_requests(self):
        self._decoding_requests = None
        self.device_decode.drop_ahead()

    def _decode(self) -> tuple[Tensor, list[float]]:
        """Returns the tokens [n] on the host that a step draws, and their log-probs. The host plans the step."""
        c, sampling = self.context, self.controller.sampling
        self.device_decode.drop_ahead()
        c.initialize_attention_state()
        ids, positions = c.current_input_and_position_ids()
        logits = self._forward({"tokens": ids, "position_ids": positions, "attention_mask": None})
        sampled = sampling.sample_kernel(logits.squeeze(0), c.total_request_count, c)
        return sampled.cpu(), sampling.log_probs(sampled).tolist()

    def _requests_in_cache(self) -> list:
        """Returns the requests of a step in which every one decodes, in the context's order."""
        if self._decoding_requests is None:
            ids = self.context.request_ids[: self.context.total_request_count]
            self._decoding_requests = [self.get_request(number) for number in ids.tolist()]
        return self._decoding_requests

    def forward(self, inputs: dict) -> Tensor:
        """Returns logits [1, N, V], or the hidden states of a pipeline stage before the last one; the routers keep the
        step's routes if they are recorded."""
        wrapper = self.controller.inference_wrapped_model
        if wrapper.config.moe_enable_routing_replay:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        return wrapper.forward_pass_without_pipeline_parallel(inputs)

    def _forward(self, inputs: dict) -> Tensor:
        """Returns logits [1, N, V] on all pipeline stages; copies recorded routes to the host."""
        logits, c = self.controller.across_stages(inputs, self.forward), self.context
        routes = c.recorded_routes()
        if routes is not None:
            c.kv_block_allocator.store_routing_per_block(routes[: c.active_token_count].cpu().short().numpy())
        return logits

    def _run_coroutine_sync(self, coro):
        """Same as Megatron's, without an event loop: a step only yields to other tasks, and there are none, except for
        those that Megatron's schedule of chunked prefill leaves on the loop."""
        if self.enable_chunked_prefill:
            return super()._run_coroutine_sync(coro)
        try:
            while True:
                coro.send(None)
        except StopIteration as done:
            return done.value

    def suspend(self):
        """Ends steps until `resume`; the cache stays where it is. Unlike Megatron's, it does not wait for the device,
        and so not for sends to other roles, which may wait for their receivers."""
        InferenceMode.unset_active()
        self.context.deallocate_inference_state_buffers()  # a mark, because the cache persists
        self.state = EngineState.SUSPENDED

    def resume(self):
        """Allows steps again, without waiting for the device."""
        InferenceMode.set_active()
        self.context.reinitialize_inference_state_buffers()
        self.state = EngineState.RUNNING

    def schedule_non_chunked_prefill(self):
        """Adds the waiting requests that fit to the next step."""
        admission.add_waiting(self)

    @property
    def _only_decodes(self) -> bool:
        """Whether the next step decodes one more token of each request of the last one."""
        return self.context.only_decodes and not admission.may_add(self)

    def _end_step(self, tokens: Tensor, logprobs: list[float]) -> dict:
        """Adds the last new token [n] of each request, and its log-prob; advances to the next step."""
        if not self.context.advance_decode(tokens):  # a request ends, or the free blocks do not suffice
            self.controller._sampled_tokens_cuda[: len(tokens)] = tokens
            self._forget_requests()
            context_state = {"chunked_prefill_request_id": -1, "kv_stats": None}
            result = self.controller._dynamic_step_context_bookkeeping()
            result |= {"log_probs": [[x] for x in logprobs], "accepted_tokens": None, "cuda_graph_request_count": None}
            return self._run_coroutine_sync(self.async_bookkeep(result, context_state, 0.0))
        for request, token, logprob in zip(self._requests_in_cache(), tokens.tolist(), logprobs, strict=True):
            request.generated_tokens.append(token)
            request.generated_log_probs.append(logprob)
        return {"finished_request_records": []}
