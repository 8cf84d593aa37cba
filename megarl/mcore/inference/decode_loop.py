"""Megatron's inference engine with a short way through the steps in which requests only go on.

In most steps of a rollout each request gets one more token, and none comes, waits or ends. Megatron's step is made for
all of these: an event loop, metadata by request, tensors of what changed. Between small layers it is a sixth of a step.
"""

from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine


class DecodeLoopEngine(DynamicInferenceEngine):
    """Writes what Megatron's writes, to the last bit."""

    _writing = None  # the requests of the step before, in the context's order, while they only go on

    def step_modern(self) -> dict:
        """A step of all requests; under "finished_request_records" the records of those that end with it."""
        if not self._goes_on:
            self._writing = None
            return super().step_modern()
        c, sampling = self.context, self.controller._sampling
        c.initialize_attention_state()
        ids, positions = c.current_input_and_position_ids()
        where = {"tokens": ids, "position_ids": positions, "attention_mask": None}
        logits = self.controller.inference_wrapped_model.forward_pass_without_pipeline_parallel(where)
        count = c.total_request_count
        drawn = sampling.sample_kernel(logits.squeeze(0), count, c, output=self.controller._sampled_tokens_cuda[:count])
        logprobs, tokens = sampling.log_probs(drawn).tolist(), drawn.cpu()
        if not c.go_on(tokens):
            return self._end_some(logprobs)
        if self._writing is None:
            self._writing = [self.get_request(number) for number in c.request_ids[:count].tolist()]
        for request, token, logprob in zip(self._writing, tokens.tolist(), logprobs, strict=True):
            request.generated_tokens.append(token)
            request.generated_log_probs.append(logprob)
        return {"finished_request_records": []}

    @property
    def _goes_on(self) -> bool:
        """Whether the next step is the last one's requests with one more token each, on one stage of a dense model."""
        wrapper = self.controller.inference_wrapped_model
        plain = wrapper.config.num_moe_experts is None and not wrapper.model_is_pipeline_parallel
        return self.context.goes_on and plain and not self.waiting_request_ids

    def _end_some(self, logprobs: list[float]) -> dict:
        """Leaves a step whose tokens are drawn to Megatron's bookkeeping."""
        self._writing, before = None, {"chunked_prefill_request_id": -1, "kv_stats": None}
        found = self.controller._dynamic_step_context_bookkeeping()
        found |= {"log_probs": [[x] for x in logprobs], "accepted_tokens": None, "cuda_graph_request_count": None}
        return self._run_coroutine_sync(self.async_bookkeep(found, before, 0.0))
