"""The rollout engine: Megatron's dynamic inference engine on the actor's own parameters.

Requests of unequal length are batched continuously; each samples its tokens from its own random stream. The engine
holds the module that trains, not a copy of the weights. The KV cache is one contiguous buffer.
"""

import contextlib
import dataclasses
import faulthandler
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.inference.config import AsyncScheduleMode, InferenceConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.attention import Attention
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.data.detokenizer import StopMatcher
from megarl.mcore import device
from megarl.mcore.config.recurrent_rules import has_states
from megarl.mcore.inference.cache_size import BLOCK_TOKENS
from megarl.mcore.inference.controller import Controller
from megarl.mcore.inference.decode_loop import DecodeLoopEngine
from megarl.mcore.inference.generation import Completion, EngineCounts, GenerationRequest
from megarl.mcore.inference.generation_session import ANY_STEP, NONE, WAIT, GenerationSession
from megarl.mcore.inference.keyed_sampling import KeyedSampling
from megarl.mcore.inference.paged_context import LatentContext, PagedContext
from megarl.mcore.inference.recurrent_context import LatentRecurrentContext, RecurrentContext
from megarl.mcore.inference.reusable_blocks import attach_routes
from megarl.mcore.inference.speculative_decode import PredictionDrafts, SpeculativeEngine
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact
from megarl.mcore.kernels.linear import prepacked_weights
from megarl.mcore.model.forward_pass import eval_mode
from megarl.mcore.model.prediction_layer import PredictionLayer
from megarl.mcore.model.recurrent_mixer import RecurrentMixer
from megarl.mcore.moe.router import moe_layers_of
from megarl.mcore.offload import KVCacheInGradBuffer
from megarl.mcore.vision.store import ImageCounts

for _signal in (signal.SIGTERM, signal.SIGINT):
    faulthandler.unregister(_signal)  # Megatron's coordinator, imported above, prints a stack at every exit

# On CUDA a step in which requests join is not a graph and takes several times as long as others. Therefore requests
# wait until a sixteenth of the places is free, and join together.
JOIN_SHARE = 16
POLL_STEPS = 16  # engine steps between two calls of `response_limit` or `interrupt`


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
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def is_empty(self) -> bool:
        return not self._queue

    def wait(self):
        """There is nothing to wait for."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What an engine does besides decoding requests one by one."""

    # Requests with a common prefix share blocks of the cache, within one call; a prefix may be the prompt of an earlier
    # request and what it wrote.
    prefix_caching: bool = False
    chunked_prefill: bool = False  # split the prefill of a prompt that does not fit into a step over several steps
    # Maximum tokens of a step, rounded up; raised if `max_requests` or an unchunked `max_length` needs more.
    step_tokens: int = 4096
    cache_in_grad_buffer: KVCacheInGradBuffer | None = None  # holds the KV cache; None: the cache has its own memory
    speculative: bool = False  # decode steps also read drafted tokens, which changes no result
    decode_graphs: bool = True  # on CUDA, decode steps are graphs where they can be
    prediction: PredictionLayer | None = None  # the model's layer of multi-token prediction, for a speculative engine
    stops: StopMatcher | None = None  # of requests to `generate` and `stream` without own ones
    # Recurrent states at ends of prompts that prefix caching keeps, if the model has such states; None: `max_requests`.
    snapshots: int | None = None


class RolloutEngine:
    """Generates with continuous batching on a model that trains, with megarl's cache, sampling and decode steps;
    suspended except inside `stream` and `session`."""

    interrupted = 0  # what ended the last `stream`: above 0, its `interrupt`

    def __init__(
        self, model, pg_collection, vocab_size: int, max_length: int, buffer_gb: float, max_requests: int, **options
    ):
        """Reserves the KV cache.

        Args:
            model: the bare GPTModel that trains.
            vocab_size: the tokenizer's vocabulary.
            max_length: of prompt and response together, in tokens.
            buffer_gb: size of the KV cache on this rank, in GiB.
            max_requests: decoded together; raised to `MIN_ROWS`.
            options: fields of `EngineOptions`.
        """
        o = EngineOptions(**options)
        tp_size = dist.get_world_size(pg_collection.tp)
        max_requests = max(max_requests, MIN_ROWS)
        min_tokens = max_requests + tp_size if o.chunked_prefill else max(max_length, max_requests + tp_size)
        config = InferenceConfig(
            block_size_tokens=BLOCK_TOKENS,
            buffer_size_gb=buffer_gb,
            max_requests=-(-max_requests // tp_size) * tp_size,
            max_tokens=PagedContext.round_up_tokens(max(o.step_tokens, min_tokens), tp_size),  # as steps are padded
            max_sequence_length=max_length,
            pg_collection=pg_collection,
            enable_prefix_caching=o.prefix_caching,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            enable_chunked_prefill=o.chunked_prefill,
            async_sched_mode=AsyncScheduleMode.LEGACY,  # a step's tokens are known before the next one is planned
            materialize_only_last_token_logits=True,
            logprobs_mode="processed_logprobs",
            use_cuda_graphs_for_non_decode_steps=False,
            offset_sampling_seed_by_dp_rank=False,
        )
        self.model, self.layers, self.prediction = model, moe_layers_of(model), o.prediction
        self.expert_group, self.tensor_group, self.stops = pg_collection.ep, pg_collection.tp, o.stops
        self.is_coupled = dist.get_world_size(pg_collection.ep) > 1  # replicas that share experts step together
        self.max_requests = config.max_requests  # in the engine at a time
        self.max_length, self.step_tokens = max_length, config.max_tokens
        # The alternative needs symmetric GPU memory; megarl's layers dispatch tokens as in training either way.
        model.config.inference_moe_token_dispatcher_type = "nccl"
        buffer = o.cache_in_grad_buffer
        self._cache_present = buffer.present if buffer else contextlib.nullcontext
        with self._cache_present():
            self._build(config, vocab_size, o)
        self.engine.device_decode.has_graphs = o.decode_graphs

    def _build(self, config: InferenceConfig, vocab_size: int, options: EngineOptions):
        model, tp_size, prediction = self.model, dist.get_world_size(config.pg_collection.tp), options.prediction
        memory = None if options.cache_in_grad_buffer is None else options.cache_in_grad_buffer.memory
        self.context = context_of(model, config, memory, options.snapshots, further_layers=int(prediction is not None))
        attach_routes(self.context, self.layers, model.config.moe_router_topk)
        wrapper = GPTInferenceWrapper(model, self.context)
        softcap = model.config.final_logit_softcapping
        self.sampling = KeyedSampling(vocab_size, tp_size, softcap, is_exact(model.config))
        self.controller = Controller(wrapper, self.sampling)
        was_training = model.training
        wrapper.prep_model_for_inference()
        kind = SpeculativeEngine if options.speculative else DecodeLoopEngine
        with torch.no_grad():
            self.engine = kind(self.controller, self.context)
        self.drafter = self.engine.drafter if options.speculative else None
        if prediction is not None:
            self.engine.prediction = drafts = PredictionDrafts(self.engine, prediction)
            self.controller.predict_for_others = drafts.predict_for_others
        self.context.request_of = self.engine.get_request
        self._prefilled = 0, 0  # tokens of prompts, read and found in the cache, when counts were taken last
        self._image_counts = ImageCounts({}, 0.0)
        self.engine.suspend()
        model.train(was_training)

    def generate(
        self,
        requests: list[GenerationRequest],
        end_ids: tuple[int, ...],
        settings: SamplingSettings,
        routes: bool = False,
    ) -> list[Completion]:
        """Returns one completion per request, in order. All ranks of a replica call it with the same requests.
        `end_ids`: tokens that end a response; `routes`: also return which experts were chosen for each token
        (arXiv 2510.11370 §3). RuntimeError: the routes of some token are missing."""
        done = dict(self.stream(RequestList(enumerate(requests)), end_ids, settings, routes))
        return [done[number] for number in range(len(requests))]

    def stream(
        self,
        source: RequestSource,
        end_ids: tuple[int, ...],
        settings: SamplingSettings,
        routes: bool = False,
        max_requests: int | None = None,
        response_limit: Callable[[], int | None] | None = None,
        interrupt: Callable[[], int] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Generates responses to all requests of a source; yields (request number, completion) as each ends.

        The engine resumes at the first item and suspends after the last one, or when the iterator is closed, which
        drops unfinished requests. Between items, this rank may run forward passes of any model, but must not update
        this one. It must not call collectives that wait for a replica which shares experts with this one, because
        that replica's engine waits for this engine.

        Args:
            end_ids, routes: as in `generate`.
            max_requests: in the engine at a time; default: as many as it can hold.
            response_limit: called every `POLL_STEPS` steps; returns the maximum response length in tokens from now
                on, None: that of each request. It may decrease: longer responses end soon, with their tokens so far.
            interrupt: called every `POLL_STEPS` steps; above 0, it ends the stream, which then yields all requests in
                the engine with their tokens so far and without routes. `interrupted` is its last result, the highest of
                the replicas that share experts.
        """
        self._steps = self.interrupted = 0
        self._max_response: int | None = None
        with self.session(end_ids, settings, routes, self.stops) as session:
            max_requests = min(max_requests or self.max_requests, self.max_requests)
            while finished := self._run_until_finished(session, source, max_requests, response_limit, interrupt):
                if self.interrupted:
                    session.clear()  # the engine must not hold requests when it is suspended
                yield from finished
                if self.interrupted:
                    return

    @contextlib.contextmanager
    def session(
        self,
        end_ids: tuple[int, ...] = (),
        settings: SamplingSettings = SamplingSettings(),
        routes: bool = False,
        stops: StopMatcher | None = None,
    ) -> Iterator[GenerationSession]:
        """Context in which the engine runs; arguments as in `generate`; `stops`: of requests without own ones."""
        self.engine.resume()
        images = self.model.images
        self.context.read_images(images)
        if images is not None:
            images.take_counts()  # of training
        try:
            with eval_mode(self.model), self._cache_present(), prepacked_weights(self.model, self.prediction):
                self.engine.device_decode.begin()
                yield GenerationSession(self, end_ids, settings, routes, stops)
        finally:
            self.engine.suspend()
            if images is not None:
                self._image_counts = self._image_counts.plus(images.take_counts())

    def _run_until_finished(
        self,
        session: GenerationSession,
        source: RequestSource,
        max_requests: int,
        response_limit: Callable[[], int | None] | None,
        interrupt: Callable[[], int] | None,
    ) -> list[tuple[int, Completion]]:
        """Runs steps until some requests finish and returns their completions; empty when all requests are done."""
        with session.inference():
            while True:
                self._steps += 1
                if response_limit and self._steps % POLL_STEPS == 0:
                    self._max_response = response_limit()
                if interrupt and self._steps % POLL_STEPS == 0:
                    self.interrupted = session.highest_of_replicas(interrupt())
                    if self.interrupted:
                        return session.unfinished()
                session.limit_responses(self._max_response)
                self._admit(session, source, max_requests)
                own = session.wanted_step if len(session) else NONE if source.is_empty() else WAIT
                agreed = session.highest_of_replicas(own)
                if agreed == NONE:
                    return []
                if agreed == WAIT:
                    source.wait()
                    continue
                if agreed == ANY_STEP and self.is_coupled:  # no graph on any replica, probably since requests join
                    self._admit(session, source, max_requests, join_others=True)
                if finished := session.step(agreed):
                    return finished

    def _admit(self, session: GenerationSession, source: RequestSource, max_requests: int, join_others: bool = False):
        """Adds requests up to `max_requests`; none while some wait for cache, since another replica may start them.
        `join_others`: also few, because the next step is not a graph in any case."""
        room = 0 if self.engine.waiting_request_ids else max_requests - len(session)
        if room <= 0 or source.is_empty():
            return
        if join_others or room >= max_requests // JOIN_SHARE or not len(session) or not device.has_cuda():
            for number, request in source.take(room):
                session.add(number, request)

    @property
    def capacity(self) -> int:
        """Maximum length of one prompt and response together that the cache can hold, in tokens."""
        return self.context.kv_block_allocator.active_count * self.context.block_size_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks of the cache that no request uses."""
        return self.context.kv_block_allocator.available

    def take_counts(self) -> EngineCounts:
        """Returns what was done since the last call."""
        c, counts, (read, reused) = self.context, EngineCounts(), self._prefilled
        if self.drafter is not None:
            counts, self.engine.counts = self.engine.counts, EngineCounts()
            predicted, right = self.drafter.take_predicted()
            counts = counts._replace(predicted=predicted, right=right)
        now = c.read_tokens, self.engine._prefill_tokens_skipped + c.prefix_cache_prefill_skipped_tokens
        self._prefilled = now
        return counts._replace(read=now[0] - read, reused=now[1] - reused)

    def take_image_counts(self) -> ImageCounts | None:
        """Returns what was read of images since the last call; None: prompts have none."""
        counts, self._image_counts = self._image_counts, ImageCounts({}, 0.0)
        return None if self.model.images is None else counts

    @property
    def empty_routes(self) -> Tensor:
        """[0, L, k] int16: empty routes, for their shape and dtype."""
        return torch.zeros(0, len(self.layers), self.model.config.moe_router_topk, dtype=torch.int16)


def context_of(
    model, config, memory: Callable[[int], Tensor] | None, snapshots: int | None, further_layers: int = 0
) -> PagedContext:
    """Returns the context for a model's kind of attention. `config`, `memory`: of the engine, and its memory, as of
    `PagedContext`; `snapshots`: as of `RecurrentContext`; `further_layers`: as of `PagedContext`."""
    if model.config.attention_slots is not None:
        return model.context(config, memory, snapshots)
    has_latents = isinstance(model.config, MLATransformerConfig)
    if has_states(model.config):
        mixers = [layer.self_attention for layer in model.decoder.layers]
        states = [isinstance(mixer, RecurrentMixer) for mixer in mixers] + [False] * further_layers
        cache = [isinstance(mixer, Attention) for mixer in mixers] + [True] * further_layers
        recurrent = LatentRecurrentContext if has_latents else RecurrentContext
        return recurrent(model.config, config, memory, has_states=states, has_cache=cache, snapshots=snapshots)
    kind = LatentContext if has_latents else PagedContext
    return kind(model.config, config, memory, further_layers)
