"""megarl's use of Megatron's dynamic inference engine: it writes text with the actor's own parameters.

No copy of the weights: the engine holds the very module that trains. The KV cache is one contiguous buffer. Requests
of unequal length are batched continuously; each draws its tokens from its own random stream.
"""

import contextlib
import faulthandler
import signal
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.engine_context import Context
from megarl.mcore.engine_routes import attach_routes
from megarl.mcore.engine_sampling import KeyedSampling
from megarl.mcore.packing import LEAST_ROWS
from megarl.mcore.router import moe_layers_of, recording
from megarl.rollout.sampling import SamplingSettings

for _signal in (signal.SIGTERM, signal.SIGINT):
    faulthandler.unregister(_signal)  # Megatron's coordinator, imported with the engine, prints a stack at every exit


@dataclass(frozen=True)
class Request:
    """One response to write: `key` names its random stream (see `rollout.random`)."""

    prompt: list[int]
    key: int
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """What the engine wrote: tokens with the end token where there is one, their log-probs, and how it ended."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    # [tokens of prompt and response, L, k] int16: experts in this rank's MoE layers, −1 in the last row.
    routes: Tensor | None = field(default=None, compare=False)


class _NoTokenizer:
    """The engine's tokenizer: requests are token ids and stay so; the end token comes with each request."""

    def detokenize(self, *_, **__) -> str:
        return ""


class RolloutEngine:
    """Continuous-batching generation on the actor's own model; suspended except inside `generate`."""

    def __init__(
        self, model, collection, vocab_size: int, max_length: int, buffer_gb: float, max_requests: int,
        prefix_caching: bool = False, chunked_prefill: bool = False, step_tokens: int = 4096,
    ):  # fmt: skip
        """Reserves the KV cache.

        Args:
            model: the bare GPTModel that trains.
            collection: the role's process groups.
            vocab_size: the tokenizer's vocabulary.
            max_length: longest prompt and response together, tokens.
            buffer_gb: size of the KV cache on this rank, GiB.
            max_requests: most requests decoded together; at least `LEAST_ROWS`.
            prefix_caching: requests that begin alike share blocks of the cache, within one call of `generate`.
            chunked_prefill: a prompt for which a step has no room is read over several.
            step_tokens: most tokens of a step; more where `max_requests` or an unchunked `max_length` need it.
        """
        tensor = dist.get_world_size(collection.tp)
        max_requests = max(max_requests, LEAST_ROWS)
        least = max_requests + tensor if chunked_prefill else max(max_length, max_requests + tensor)
        config = InferenceConfig(
            block_size_tokens=256 if device.has_cuda() else 16,
            buffer_size_gb=buffer_gb,
            max_requests=-(-max_requests // tensor) * tensor,
            max_tokens=max(step_tokens, least),
            max_sequence_length=max_length,
            pg_collection=collection,
            enable_prefix_caching=prefix_caching,
            enable_chunked_prefill=chunked_prefill,
            materialize_only_last_token_logits=True,
            logprobs_mode="processed_logprobs",
            use_cuda_graphs_for_non_decode_steps=False,
            offset_sampling_seed_by_dp_rank=False,
        )
        self.model, self.experts, self.layers = model, collection.ep, moe_layers_of(model)
        # Its other choice needs symmetric GPU memory; megarl's layers dispatch tokens as in training either way.
        model.config.inference_moe_token_dispatcher_type = "nccl"
        self.context = Context(model.config, config)
        attach_routes(self.context, self.layers, model.config, collection.tp)
        wrapper = GPTInferenceWrapper(model, self.context)
        self.sampling = KeyedSampling(vocab_size, tensor)
        self.controller = controller = TextGenerationController(wrapper, _NoTokenizer())
        controller._sampling = self.sampling
        was_training = model.training
        wrapper.prep_model_for_inference()
        with torch.no_grad():
            self.engine = DynamicInferenceEngine(controller, self.context)
        self.engine.suspend()
        model.train(was_training)

    @property
    def no_routes(self) -> Tensor:
        """[0, L, k] int16: the routes of no token."""
        return torch.zeros(0, len(self.layers), self.model.config.moe_router_topk, dtype=torch.int16)

    def generate(
        self, requests: list[Request], end_token: int, settings: SamplingSettings, routes: bool = False
    ) -> list[Completion]:
        """Writes one completion a request, in their order. A call of all ranks of the lane with the same requests.

        Args:
            routes: also return which experts worked for each token (arXiv 2510.11370 §3).

        Raises:
            RuntimeError: `routes` of some token are missing.
        """
        was_training = self.model.training
        self.model.eval()
        self.engine.resume()
        try:
            with torch.inference_mode(), recording(self.model) if routes else contextlib.nullcontext():
                return self._generate(requests, end_token, settings, routes)
        finally:
            self.engine.suspend()
            InferenceMode.unset_active()
            # Scratch memory of sequence parallelism that was made in inference mode cannot be written to in training.
            parallel_state.get_global_memory_buffer().buffer.clear()
            self.model.train(was_training)

    def _generate(self, requests, end_token, settings, routes: bool) -> list[Completion]:
        self.context.reset()  # blocks of an earlier call, prefixes too, were computed with older weights
        self.context.kv_block_allocator.record(routes)
        self.engine.requests.clear()
        self.engine.waiting_request_ids.clear()  # of a call that an error ended
        self.sampling.settings = settings
        self.sampling.keys = torch.tensor([r.key for r in requests], dtype=torch.int64)
        for number, request in enumerate(requests):
            self.engine.add_request(number, request.prompt, _params(request, end_token))
        done = [None] * len(requests)
        while self._any_lane_writes():
            if not self.engine.has_unfinished_requests():
                self.controller.dummy_forward()  # this rank's experts work for other lanes' tokens
                continue
            for record in self.engine.step_modern()["finished_request_records"]:
                done[record.request_id] = self._completion(record.merge(), end_token, routes)
        return done

    def _completion(self, request, end_token: int, routes: bool) -> Completion:
        tokens = [int(t) for t in request.generated_tokens]
        logprobs = [float(p) for p in request.generated_log_probs]
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"the engine returned {len(tokens)} tokens and {len(logprobs)} log-probs for a request")
        count, blocks = len(request.prompt_tokens) + len(tokens), self.context.kv_block_allocator
        recorded = blocks.routes_of(request.request_id, count) if routes else None
        return Completion(tokens, logprobs, bool(tokens) and tokens[-1] == end_token, recorded)

    def _any_lane_writes(self) -> bool:
        """Whether a lane that shares experts with this one has requests left: all of them step until none has."""
        mine = self.engine.has_unfinished_requests()
        if dist.get_world_size(self.experts) == 1:
            return mine
        left = torch.tensor([mine], dtype=torch.int32, device=device.device())
        dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self.experts)
        return bool(left)


def _params(request: Request, end_token: int) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=request.max_new_tokens,
        termination_id=end_token,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
