"""The inference engine of a rollout, built on the actor's own parameters, between its calls.

The engine holds the module that trains, not a copy of the weights. The KV cache is one contiguous buffer.
"""

import contextlib
import dataclasses
import faulthandler
import signal
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.inference.config import AsyncScheduleMode, InferenceConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megarl.data.stop_strings import StopMatcher
from megarl.mcore.config.recurrent_rules import has_states
from megarl.mcore.inference.cache_size import BLOCK_TOKENS
from megarl.mcore.inference.controller import Controller
from megarl.mcore.inference.decode_loop import DecodeLoopEngine
from megarl.mcore.inference.keyed_sampling import KeyedSampling
from megarl.mcore.inference.paged_context import LatentContext, PagedContext
from megarl.mcore.inference.prediction_drafts import PredictionDrafts
from megarl.mcore.inference.recorded_routes import attach_routes
from megarl.mcore.inference.recurrent_context import RecurrentContext
from megarl.mcore.inference.reusable_blocks import PrefillCounts
from megarl.mcore.inference.speculative_decode import DecodeCounts, SpeculativeEngine
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact
from megarl.mcore.memory.offload import KVCacheInGradBuffer
from megarl.mcore.model.prediction_layer import PredictionLayer
from megarl.mcore.model.recurrent_mixer import RecurrentMixer
from megarl.mcore.moe.router import moe_layers_of

for _signal in (signal.SIGTERM, signal.SIGINT):
    faulthandler.unregister(_signal)  # Megatron's coordinator, imported above, prints a stack at every exit


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


class BuiltEngine:
    """Megatron's dynamic inference engine on a model that trains, with megarl's cache, sampling and decode steps."""

    def __init__(
        self, model, pg_collection, vocab_size: int, max_length: int, buffer_gb: float, max_requests: int, **options
    ):
        """Reserves the KV cache.

        Args:
            model: the bare GPTModel that trains.
            pg_collection: the role's process groups.
            vocab_size: the tokenizer's vocabulary.
            max_length: maximum length of prompt and response together, in tokens.
            buffer_gb: size of the KV cache on this rank, in GiB.
            max_requests: maximum number of requests decoded together; raised to `MIN_ROWS`.
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
        self.expert_group, self.stops = pg_collection.ep, o.stops
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
            self.engine.prediction = drafts = PredictionDrafts(
                model, prediction, self.context, self.sampling, self.engine.device_decode
            )
            self.controller.predict_for_others = drafts.predict_for_others
        self.context.request_of = self.engine.get_request
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

    def take_decode_counts(self) -> DecodeCounts:
        """Returns what decode steps did since the last call; zeros if the engine is not speculative."""
        if self.drafter is None:
            return DecodeCounts()
        counts, self.engine.counts = self.engine.counts, DecodeCounts()
        predicted, right = self.drafter.take_predicted()
        return counts._replace(predicted=predicted, right=right)

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


def context_of(
    model, config, memory: Callable[[int], Tensor] | None, snapshots: int | None, further_layers: int = 0
) -> PagedContext:
    """Returns the context for a model's kind of attention.

    Args:
        config, memory: of the engine, and its memory, as of `PagedContext`.
        snapshots: as of `RecurrentContext`.
        further_layers: as of `PagedContext`.
    """
    if hasattr(model, "slots"):  # of transformers
        from megarl.mcore.any_model.cache import SlotContext

        return SlotContext(model.config, config, memory, slots=model.slots)
    if has_states(model.config):
        mixers = [layer.self_attention for layer in model.decoder.layers]
        states = [isinstance(mixer, RecurrentMixer) for mixer in mixers] + [False] * further_layers
        cache = [isinstance(mixer, SelfAttention) for mixer in mixers] + [True] * further_layers
        return RecurrentContext(model.config, config, memory, has_states=states, has_cache=cache, snapshots=snapshots)
    kind = LatentContext if isinstance(model.config, MLATransformerConfig) else PagedContext
    return kind(model.config, config, memory, further_layers)
