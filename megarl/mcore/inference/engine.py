"""megarl's use of Megatron's dynamic inference engine: it writes text with the actor's own parameters.

No copy of the weights: the engine holds the very module that trains. The KV cache is one contiguous buffer. Requests
of unequal length are batched continuously; each draws its tokens from its own random stream.
"""

import contextlib
import faulthandler
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore import device
from megarl.mcore.inference.decode_loop import DecodeLoopEngine
from megarl.mcore.inference.keyed_sampling import KeyedSampling
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.inference.recorded_routes import attach_routes
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.linear import prepacked_weights
from megarl.mcore.memory.offload import KVCacheInGradBuffer
from megarl.mcore.moe.router import moe_layers_of, recording_routes

POLL_STEPS = 16  # steps between two questions how long responses may be

for _signal in (signal.SIGTERM, signal.SIGINT):
    faulthandler.unregister(_signal)  # Megatron's coordinator, imported with the engine, prints a stack at every exit


@dataclass(frozen=True)
class GenerationRequest:
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


class RequestSource(Protocol):
    """Where the engine's requests come from. All ranks of a lane ask at the same times and get the same answers."""

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """At most `room` more requests, each with its number; none where there are none for now."""

    def is_empty(self) -> bool:
        """Whether no request will come any more."""


class RequestList:
    """A source of requests that are known, each with its number."""

    def __init__(self, requests: Iterable[tuple[int, GenerationRequest]]):
        self._left = deque(requests)

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """The next ones."""
        return [self._left.popleft() for _ in range(min(room, len(self._left)))]

    def is_empty(self) -> bool:
        """Whether all were taken."""
        return not self._left


class _TokenIdsOnly:
    """The engine's tokenizer: requests are token ids and stay so; the end token comes with each request."""

    def detokenize(self, *_, **__) -> str:
        return ""


class RolloutEngine:
    """Continuous-batching generation on the actor's own model; suspended except inside `stream`."""

    def __init__(
        self, model, pg_collection, vocab_size: int, max_length: int, buffer_gb: float, max_requests: int,
        prefix_caching: bool = False, chunked_prefill: bool = False, step_tokens: int = 4096, cache_in_grad_buffer: KVCacheInGradBuffer | None = None,
    ):  # fmt: skip
        """Reserves the KV cache.

        Args:
            model: the bare GPTModel that trains.
            pg_collection: the role's process groups.
            vocab_size: the tokenizer's vocabulary.
            max_length: longest prompt and response together, tokens.
            buffer_gb: size of the KV cache on this rank, GiB.
            max_requests: most requests decoded together; at least `LEAST_ROWS`.
            prefix_caching: requests that begin alike share blocks of the cache, within one call.
            chunked_prefill: a prompt for which a step has no room is read over several.
            step_tokens: most tokens of a step; more where `max_requests` or an unchunked `max_length` need it.
            cache_in_grad_buffer: the bytes that hold the cache; by default it has its own.
        """
        tensor = dist.get_world_size(pg_collection.tp)
        max_requests = max(max_requests, MIN_ROWS)
        least = max_requests + tensor if chunked_prefill else max(max_length, max_requests + tensor)
        config = InferenceConfig(
            block_size_tokens=256 if device.has_cuda() else 16,
            buffer_size_gb=buffer_gb,
            max_requests=-(-max_requests // tensor) * tensor,
            max_tokens=max(step_tokens, least),
            max_sequence_length=max_length,
            pg_collection=pg_collection,
            enable_prefix_caching=prefix_caching,
            enable_chunked_prefill=chunked_prefill,
            materialize_only_last_token_logits=True,
            logprobs_mode="processed_logprobs",
            use_cuda_graphs_for_non_decode_steps=False,
            offset_sampling_seed_by_dp_rank=False,
        )
        self.model, self.experts, self.layers = model, pg_collection.ep, moe_layers_of(model)
        self.is_coupled = dist.get_world_size(pg_collection.ep) > 1  # lanes that share experts step together
        self.most = config.max_requests  # requests in the engine at a time
        # Its other choice needs symmetric GPU memory; megarl's layers dispatch tokens as in training either way.
        model.config.inference_moe_token_dispatcher_type = "nccl"
        self._present = cache_in_grad_buffer.present if cache_in_grad_buffer else contextlib.nullcontext  # of the cache
        with self._present():
            self._build(config, pg_collection, vocab_size, cache_in_grad_buffer)

    def _build(
        self, config: InferenceConfig, pg_collection, vocab_size: int, cache_in_grad_buffer: KVCacheInGradBuffer | None
    ):
        model, tensor = self.model, dist.get_world_size(pg_collection.tp)
        self.context = PagedContext(model.config, config, cache_in_grad_buffer and cache_in_grad_buffer.memory)
        attach_routes(self.context, self.layers, model.config, pg_collection.tp)
        wrapper = GPTInferenceWrapper(model, self.context)
        self.sampling = KeyedSampling(vocab_size, tensor)
        self.controller = controller = TextGenerationController(wrapper, _TokenIdsOnly())
        controller._sampling = self.sampling
        was_training = model.training
        wrapper.prep_model_for_inference()
        with torch.no_grad():
            self.engine = DecodeLoopEngine(controller, self.context)
        self.engine.suspend()
        model.train(was_training)

    @property
    def capacity(self) -> int:
        """Tokens of the longest prompt and response together that the cache can hold."""
        return self.context.kv_block_allocator.active_count * self.context.block_size_tokens

    @property
    def no_routes(self) -> Tensor:
        """[0, L, k] int16: the routes of no token."""
        return torch.zeros(0, len(self.layers), self.model.config.moe_router_topk, dtype=torch.int16)

    def generate(
        self, requests: list[GenerationRequest], end_token: int, settings: SamplingSettings, routes: bool = False
    ) -> list[Completion]:
        """Writes one completion a request, in their order. A call of all ranks of the lane with the same requests.

        Args:
            routes: also return which experts worked for each token (arXiv 2510.11370 §3).

        Raises:
            RuntimeError: `routes` of some token are missing.
        """
        done = dict(self.stream(RequestList(enumerate(requests)), end_token, settings, routes))
        return [done[number] for number in range(len(requests))]

    def stream(
        self, source: RequestSource, end_token: int, settings: SamplingSettings, routes: bool = False, most: int | None = None,
        longest: Callable[[], int | None] | None = None,
    ) -> Iterator[tuple[int, Completion]]:  # fmt: skip
        """Writes all that a source has: (request's number, completion) of each as it ends.

        The engine wakes with the first and sleeps after the last, or when the iterator is closed; what is unfinished
        then is lost. In between other models of this rank may run, and this one, but not learn; and no collective may
        wait for a lane that shares experts with this one, whose engine waits for this one's.

        Args:
            source: gives the same requests to all ranks of a lane.
            routes: as in `generate`.
            most: requests in the engine at a time; default as many as it can hold.
            longest: asked every `POLL` steps how many tokens a response may have from now on, None: as many as its
                request says. It may say less than before. Responses with more end soon, with what they have.
        """
        was_training = self.model.training
        self.model.eval()
        self.engine.resume()
        try:
            with self._present(), prepacked_weights(self.model):
                self._begin(settings, routes)
                self._longest, self._bound = longest, None
                while ended := self._write_on(source, end_token, routes, min(most or self.most, self.most)):
                    yield from ended
        finally:
            self.engine.suspend()
            self.model.train(was_training)

    def _begin(self, settings: SamplingSettings, routes: bool):
        self.context.reset()  # blocks of an earlier call, prefixes too, were computed with older weights
        self.context.kv_block_allocator.record(routes)
        self.engine.requests.clear()
        self.engine.waiting_request_ids.clear()  # of a call that was not finished
        self.sampling.settings, self.sampling.keys = settings, torch.zeros(self.most, dtype=torch.int64)
        self._numbers: dict[int, int] = {}  # the engine's number of each request in it -> its source's
        self._entered = self._steps = 0
        self._prompts = torch.zeros_like(self.sampling.keys)  # length of each request's prompt, as it came
        InferenceMode.unset_active()

    def _write_on(self, source: RequestSource, end_token: int, routes: bool, most: int) -> list[tuple[int, Completion]]:
        """What ends with the next step in which something ends; nothing when all is written."""
        with torch.inference_mode(), self._at_work(routes):
            while True:
                self._steps += 1
                if self._longest and self._steps % POLL_STEPS == 0:
                    self._bound = self._longest()
                self._cut(self._bound)
                self._take(source, end_token, most)
                if not self._any_replica_generates(source):
                    return []
                if not self.engine.has_unfinished_requests():
                    if self.is_coupled:
                        self.controller.dummy_forward()  # this rank's experts work for other lanes' tokens
                elif records := self.engine.step_modern()["finished_request_records"]:
                    return [self._completion(record.merge(), end_token, routes) for record in records]

    @contextlib.contextmanager
    def _at_work(self, routes: bool):
        InferenceMode.set_active()
        try:
            with recording_routes(self.model) if routes else contextlib.nullcontext():
                yield
        finally:
            InferenceMode.unset_active()
            # Scratch memory of sequence parallelism that was made in inference mode cannot be written to in training.
            parallel_state.get_global_memory_buffer().buffer.clear()

    def _take(self, source: RequestSource, end_token: int, most: int):
        """Fills the engine up. A lane whose cache is full takes nothing: what waits in it no other lane can begin."""
        room = 0 if self.engine.waiting_request_ids else most - len(self._numbers)
        if room <= 0 or source.is_empty():
            return
        for number, request in source.take(room):
            self._numbers[self._entered] = number
            if self._entered == len(self._prompts):
                more = torch.zeros_like(self._prompts)
                self.sampling.keys, self._prompts = (torch.cat([x, more]) for x in (self.sampling.keys, self._prompts))
            self.sampling.keys[self._entered], self._prompts[self._entered] = request.key, len(request.prompt)
            self.engine.add_request(self._entered, request.prompt, _params(request, end_token))
            self._entered += 1

    def _cut(self, longest: int | None):
        """Ends the responses in the cache that have so many tokens with the next step, others when they have."""
        if longest is not None:
            c, inside = self.context, slice(self.context.total_request_count)
            bounds = self._prompts[c.request_ids[inside].long()] + longest
            c.request_output_lengths[inside] = c.request_output_lengths[inside].minimum(bounds)

    def _completion(self, request, end_token: int, routes: bool) -> tuple[int, Completion]:
        tokens = [int(t) for t in request.generated_tokens]
        logprobs = [float(p) for p in request.generated_log_probs]
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"the engine returned {len(tokens)} tokens and {len(logprobs)} log-probs for a request")
        count, blocks = len(request.prompt_tokens) + len(tokens), self.context.kv_block_allocator
        recorded = blocks.routes_of(request.request_id, count) if routes else None
        completion = Completion(tokens, logprobs, bool(tokens) and tokens[-1] == end_token, recorded)
        return self._numbers.pop(request.request_id), completion

    def _any_replica_generates(self, source: RequestSource) -> bool:
        """Whether a lane that shares experts with this one has requests left: all of them step until none has."""
        mine = self.engine.has_unfinished_requests() or not source.is_empty()
        if not self.is_coupled:
            return mine
        left = torch.tensor([mine], dtype=torch.int32, device=device.device())
        dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self.experts)
        return bool(left)


def _params(request: GenerationRequest, end_token: int) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=request.max_new_tokens,
        termination_id=end_token,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
