"""Megatron's inference engine with a fast path for steps in which every request only decodes one more token.

Most steps of a rollout are such steps: no request joins or ends. Megatron's step handles all of these cases with
an event loop, per-request metadata and tensors of changes. With small layers, that takes a sixth of the step's time.
"""

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megarl.mcore.absent import TRACKERS, absent
from megarl.mcore.inference import admission
from megarl.observe import activity

with absent(*TRACKERS):
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine


class DecodeLoopEngine(DynamicInferenceEngine):
    """Generates the same tokens, log-probs and routes as Megatron's engine, to the last bit."""

    # Requests of the previous step, in the context's order, while steps only decode.
    _decoding_requests: list | None = None

    def step_modern(self) -> dict:
        """Runs one step of all requests; returns the finished requests under "finished_request_records"."""
        activity.tick()
        if not self._only_decodes:
            self._decoding_requests = None
            return super().step_modern()
        c, sampling = self.context, self.controller._sampling
        c.initialize_attention_state()
        ids, positions = c.current_input_and_position_ids()
        inputs = {"tokens": ids, "position_ids": positions, "attention_mask": None}
        logits = self._forward(inputs)
        count = c.total_request_count
        output = self.controller._sampled_tokens_cuda[:count]
        sampled = sampling.sample_kernel(logits.squeeze(0), count, c, output=output)
        logprobs, tokens = sampling.log_probs(sampled).tolist(), sampled.cpu()
        if not c.advance_decode(tokens):
            return self._finish_step(logprobs)
        self._decoding_requests = self._requests_in_cache()
        for request, token, logprob in zip(self._decoding_requests, tokens.tolist(), logprobs, strict=True):
            request.generated_tokens.append(token)
            request.generated_log_probs.append(logprob)
        return {"finished_request_records": []}

    def _requests_in_cache(self) -> list:
        """Returns the requests of a step in which every one decodes, in the context's order."""
        ids = self.context.request_ids[: self.context.total_request_count]
        return self._decoding_requests or [self.get_request(number) for number in ids.tolist()]

    def _forward(self, inputs: dict):
        """Returns logits [1, N, V]; keeps the step's routes if they are recorded."""
        wrapper = self.controller.inference_wrapped_model
        if not wrapper.config.moe_enable_routing_replay:
            return wrapper.forward_pass_without_pipeline_parallel(inputs)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        logits = wrapper.forward_pass_without_pipeline_parallel(inputs)
        self.context.kv_block_allocator.store_routing_per_block(self.controller._router_record_bookkeeping())
        return logits

    def schedule_non_chunked_prefill(self):
        """Adds the waiting requests that fit to the next step."""
        if admission.can_add_together(self):
            return admission.add_waiting(self)
        return super().schedule_non_chunked_prefill()

    @property
    def _only_decodes(self) -> bool:
        """Whether the next step decodes one more token of each request of the last one, in a one-stage model that
        shares no experts with other replicas."""
        is_staged = self.controller.inference_wrapped_model.model_is_pipeline_parallel
        return self.context.only_decodes and not is_staged and not admission.may_add(self)

    def _finish_step(self, logprobs: list[float]) -> dict:
        """Runs Megatron's bookkeeping after sampling, because a request ends or the free blocks do not suffice."""
        self._decoding_requests, context_state = None, {"chunked_prefill_request_id": -1, "kv_stats": None}
        result = self.controller._dynamic_step_context_bookkeeping()
        result |= {"log_probs": [[x] for x in logprobs], "accepted_tokens": None, "cuda_graph_request_count": None}
        return self._run_coroutine_sync(self.async_bookkeep(result, context_state, 0.0))
