"""The rollout engine: Megatron's dynamic inference engine on the actor's own parameters.

The engine holds the module that trains, not a copy of the weights. The KV cache is one contiguous buffer. Requests of
unequal length are batched continuously; each samples its tokens from its own random stream.
"""

import contextlib
import faulthandler
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from torch import Tensor

from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.mcore import device
from megarl.mcore.inference.decode_loop import DecodeLoopEngine
from megarl.mcore.inference.end_tokens import EndTokens, EndTokensController
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.mcore.inference.keyed_sampling import KeyedSampling
from megarl.mcore.inference.latent_context import context_of
from megarl.mcore.inference.recorded_routes import attach_routes
from megarl.mcore.inference.reusable_blocks import PrefillCounts
from megarl.mcore.inference.session import GenerationSession
from megarl.mcore.inference.speculative_decode import DecodeCounts, SpeculativeEngine
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact
from megarl.mcore.kernels.linear import prepacked_weights
from megarl.mcore.memory.offload import KVCacheInGradBuffer
from megarl.mcore.moe.router import moe_layers_of

BLOCK_TOKENS = 64 if device.has_cuda() else 16  # of the KV cache; prompts share whole blocks
POLL_STEPS = 16  # engine steps between two calls of `response_limit`
_NONE, _WAITING, _RUNNING = 0, 1, 2  # what a replica has left: nothing, requests that will come, or that run

for _signal in (signal.SIGTERM, signal.SIGINT):
    faulthandler.unregister(_signal)  # Megatron's coordinator, imported above, prints a stack at every exit


class RequestSource(Protocol):
    """Source of the engine's requests. All ranks of a replica call it at the same steps and get the same results."""

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """Returns at most `room` more requests, each with its number; none if none are available now."""

    def is_empty(self) -> bool:
        """Whether `take` will return no more requests."""

    def wait(self):
        """Waits a while for requests; called when nothing runs, on this replica and on those that share experts."""


class RequestList:
    """A source of numbered requests that are known in advance."""

    def __init__(self, requests: Iterable[tuple[int, GenerationRequest]]):
        self._queue = deque(requests)

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """Returns the next requests."""
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def is_empty(self) -> bool:
        """Whether all requests were taken."""
        return not self._queue

    def wait(self):
        """There is nothing to wait for."""


class RolloutEngine:
    """Generates with continuous batching on the actor's own model; suspended except inside `stream`."""

    def __init__(
        self, model, pg_collection, vocab_size: int, max_length: int, buffer_gb: float, max_requests: int,
        prefix_caching: bool = False, chunked_prefill: bool = False, step_tokens: int = 4096,
        cache_in_grad_buffer: KVCacheInGradBuffer | None = None, speculative: bool = False,
    ):  # fmt: skip
        """Reserves the KV cache.

        Args:
            model: the bare GPTModel that trains.
            pg_collection: the role's process groups.
            vocab_size: the tokenizer's vocabulary.
            max_length: maximum length of prompt and response together, in tokens.
            buffer_gb: size of the KV cache on this rank, in GiB.
            max_requests: maximum number of requests decoded together; raised to `MIN_ROWS`.
            prefix_caching: requests with a common prefix share blocks of the cache, within one call; a prefix may be
                the prompt of an earlier request and what it wrote.
            chunked_prefill: split the prefill of a prompt that does not fit into a step over several steps.
            step_tokens: maximum tokens of a step; raised if `max_requests` or an unchunked `max_length` needs more.
            cache_in_grad_buffer: the gradient buffer that holds the KV cache; None: the cache has its own memory.
            speculative: decode steps also read drafted tokens, which changes no result.
        """
        tp_size = dist.get_world_size(pg_collection.tp)
        max_requests = max(max_requests, MIN_ROWS)
        min_tokens = max_requests + tp_size if chunked_prefill else max(max_length, max_requests + tp_size)
        config = InferenceConfig(
            block_size_tokens=BLOCK_TOKENS,
            buffer_size_gb=buffer_gb,
            max_requests=-(-max_requests // tp_size) * tp_size,
            max_tokens=max(step_tokens, min_tokens),
            max_sequence_length=max_length,
            pg_collection=pg_collection,
            enable_prefix_caching=prefix_caching,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            enable_chunked_prefill=chunked_prefill,
            materialize_only_last_token_logits=True,
            logprobs_mode="processed_logprobs",
            use_cuda_graphs_for_non_decode_steps=False,
            offset_sampling_seed_by_dp_rank=False,
        )
        self.model, self.expert_group, self.layers = model, pg_collection.ep, moe_layers_of(model)
        self.is_coupled = dist.get_world_size(pg_collection.ep) > 1  # replicas that share experts step together
        self.max_requests = config.max_requests  # in the engine at a time
        self.max_length, self.step_tokens = max_length, config.max_tokens
        # The alternative needs symmetric GPU memory; megarl's layers dispatch tokens as in training either way.
        model.config.inference_moe_token_dispatcher_type = "nccl"
        self._cache_present = cache_in_grad_buffer.present if cache_in_grad_buffer else contextlib.nullcontext
        with self._cache_present():
            self._build(config, pg_collection, vocab_size, cache_in_grad_buffer, speculative)

    def _build(
        self, config: InferenceConfig, pg_collection, vocab_size: int,
        cache_in_grad_buffer: KVCacheInGradBuffer | None, speculative: bool,
    ):  # fmt: skip
        model, tp_size = self.model, dist.get_world_size(pg_collection.tp)
        self.context = context_of(model.config, config, cache_in_grad_buffer and cache_in_grad_buffer.memory)
        attach_routes(self.context, self.layers, model.config, pg_collection.tp)
        wrapper = GPTInferenceWrapper(model, self.context)
        softcap = model.config.final_logit_softcapping
        self.sampling = KeyedSampling(vocab_size, tp_size, softcap, is_exact(model.config))
        self.controller = controller = EndTokensController(wrapper, None)
        controller._sampling = self.sampling
        was_training = model.training
        wrapper.prep_model_for_inference()
        with torch.no_grad():
            self.engine = (SpeculativeEngine if speculative else DecodeLoopEngine)(controller, self.context)
        self.drafter = self.engine.drafter if speculative else None
        self.context.kv_block_allocator.text_of = self._text_of
        self._prefill_counts = PrefillCounts()  # when they were taken last
        self.engine.suspend()
        model.train(was_training)

    @property
    def capacity(self) -> int:
        """Maximum length of one prompt and response together that the cache can hold, in tokens."""
        return self.context.kv_block_allocator.active_count * self.context.block_size_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks of the cache that no request uses."""
        return self.context.kv_block_allocator.available

    def _text_of(self, request_id: int) -> list[int]:
        """Tokens of a request in the engine that were drawn before the present step."""
        request = self.engine.get_request(request_id)
        return [*request.prompt_tokens.tolist(), *request.generated_tokens]

    def take_decode_counts(self) -> DecodeCounts:
        """Returns what decode steps did since the last call; zeros if the engine is not speculative."""
        if self.drafter is None:
            return DecodeCounts()
        counts, self.engine.counts = self.engine.counts, DecodeCounts()
        return counts

    def take_prefill_counts(self) -> PrefillCounts:
        """Returns the tokens of prompts that were read, and found in the cache, since the last call."""
        c, before = self.context, self._prefill_counts
        reused = self.engine._prefill_tokens_skipped + c.prefix_cache_prefill_skipped_tokens
        self._prefill_counts = now = PrefillCounts(c.read_tokens, reused)
        return PrefillCounts(now.read - before.read, now.reused - before.reused)

    @property
    def empty_routes(self) -> Tensor:
        """[0, L, k] int16: empty routes, for their shape and dtype."""
        return torch.zeros(0, len(self.layers), self.model.config.moe_router_topk, dtype=torch.int16)

    def generate(
        self, requests: list[GenerationRequest], end_ids: tuple[int, ...], settings: SamplingSettings,
        routes: bool = False,
    ) -> list[Completion]:  # fmt: skip
        """Returns one completion per request, in order. All ranks of a replica call it with the same requests.

        Args:
            end_ids: tokens that end a response.
            routes: also return which experts were chosen for each token (arXiv 2510.11370 §3).

        Raises:
            RuntimeError: the routes of some token are missing.
        """
        done = dict(self.stream(RequestList(enumerate(requests)), end_ids, settings, routes))
        return [done[number] for number in range(len(requests))]

    def stream(
        self, source: RequestSource, end_ids: tuple[int, ...], settings: SamplingSettings, routes: bool = False,
        max_requests: int | None = None, response_limit: Callable[[], int | None] | None = None,
    ) -> Iterator[tuple[int, Completion]]:  # fmt: skip
        """Generates responses to all requests of a source; yields (request number, completion) as each ends.

        The engine resumes at the first item and suspends after the last one, or when the iterator is closed, which
        drops unfinished requests. Between items, this rank may run forward passes of any model, but must not update
        this one. It must not call collectives that wait for a replica which shares experts with this one, because
        that replica's engine waits for this engine.

        Args:
            source: returns the same requests on all ranks of a replica.
            end_ids, routes: as in `generate`.
            max_requests: maximum number of requests in the engine at a time; default: as many as it can hold.
            response_limit: called every `POLL_STEPS` steps; returns the maximum response length in tokens from now
                on, None: that of each request. It may decrease: longer responses end soon, with their tokens so far.
        """
        self._steps = 0
        self._max_response: int | None = None
        with self.session(end_ids, settings, routes) as session:
            max_requests = min(max_requests or self.max_requests, self.max_requests)
            while finished := self._run_until_finished(session, source, max_requests, response_limit):
                yield from finished

    @contextlib.contextmanager
    def session(
        self, end_ids: tuple[int, ...] = (), settings: SamplingSettings = SamplingSettings(), routes: bool = False
    ) -> Iterator[GenerationSession]:
        """Context in which the engine runs, without requests at first. Arguments as in `generate`."""
        was_training = self.model.training
        self.model.eval()
        self.engine.resume()
        try:
            with self._cache_present(), prepacked_weights(self.model):
                self.engine.device_decode.begin()
                yield GenerationSession(self, EndTokens(end_ids), settings, routes)
        finally:
            self.engine.suspend()
            self.model.train(was_training)

    def _run_until_finished(
        self, session: GenerationSession, source: RequestSource, max_requests: int,
        response_limit: Callable[[], int | None] | None,
    ) -> list[tuple[int, Completion]]:  # fmt: skip
        """Runs steps until some requests finish and returns their completions; empty when all requests are done."""
        with session.inference():
            while True:
                self._steps += 1
                if response_limit and self._steps % POLL_STEPS == 0:
                    self._max_response = response_limit()
                session.limit_responses(self._max_response)
                self._admit(session, source, max_requests)
                own = _RUNNING if session.has_requests else _NONE if source.is_empty() else _WAITING
                work = session.highest_of_replicas(own)
                if work == _NONE:
                    return []
                if work == _WAITING:
                    source.wait()
                elif finished := session.step():
                    return finished

    def _admit(self, session: GenerationSession, source: RequestSource, max_requests: int):
        """Adds requests up to `max_requests`; none while some wait for cache, since another replica may start them."""
        room = 0 if self.engine.waiting_request_ids else max_requests - len(session)
        if room > 0 and not source.is_empty():
            for number, request in source.take(room):
                session.add(number, request)
