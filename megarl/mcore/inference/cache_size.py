"""Size of the rollout's KV cache: what a token takes, and what a number of GiB holds. For the engine, and for plans."""

import copy
import math
from collections.abc import Sequence

from megatron.core.transformer import MLATransformerConfig

from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.recurrence import layer_sizes
from megarl.mcore.recurrence.runs import States

GIB = 2**30
Shapes = Sequence[tuple[int, ...]]
BLOCK_TOKENS_CUDA, BLOCK_TOKENS_CPU = 64, 16
BLOCK_TOKENS = BLOCK_TOKENS_CUDA if device.has_cuda() else BLOCK_TOKENS_CPU  # prompts share whole blocks


def latent_widths(model_config, has_indexer: Sequence[bool]) -> list[int]:
    """Numbers of a token in the cache of each layer with multi-latent attention, on every tensor-parallel rank: a
    latent, its shared key, and the key of the layer's indexer."""
    width, index_key = model_config.kv_lora_rank + model_config.qk_pos_emb_head_dim, model_config.dsa_indexer_head_dim
    return [width + (index_key if has else 0) for has in has_indexer]


def one_stage(model_config, layers: int, heads: tuple[int, int] | None = None):
    """A copy of a model's config whose layers are so many and on one stage, as far as Megatron's context reads it.
    `heads`: query groups and channels of a key in the cache; None: those of the model."""
    config = copy.copy(model_config)
    config.num_layers, config.pipeline_model_parallel_size = layers, 1
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    config.pipeline_model_parallel_layout = config.virtual_pipeline_model_parallel_size = None
    config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = False
    if heads is not None:
        config.num_query_groups, config.kv_channels = heads
    return config


def token_bytes(model_config, has_indexer: Sequence[bool], tensor_ranks: int) -> int:
    """Bytes of a token's keys and values in some layers on a tensor-parallel rank, as in Megatron's context.
    `has_indexer`: whether each of these layers has one."""
    if isinstance(model_config, MLATransformerConfig):
        return sum(latent_widths(model_config, has_indexer)) * model_config.params_dtype.itemsize
    heads = max(model_config.num_query_groups // tensor_ranks, 1)
    return 2 * len(has_indexer) * heads * model_config.kv_channels * model_config.params_dtype.itemsize


def state_bytes(model_config, layers: int, tensor_ranks: int) -> int:
    """Bytes of a request's recurrent states, always fp32, in that many layers on a tensor-parallel rank."""
    sizes = layer_sizes(model_config, tensor_ranks)
    return layers * bytes_of_shapes(States.shapes(1, model_config.linear_conv_kernel_dim, sizes))


def bytes_of_shapes(shapes: Shapes) -> int:
    """Bytes of a state of tensors with these shapes, which are always fp32."""
    return 4 * sum(map(math.prod, shapes))


def snapshot_count(requests: int, prefix_caching: bool, wanted: int | None) -> int:
    """Recurrent states at ends of prompts that a buffer has beside those of requests; None: as many."""
    return (requests if wanted is None else wanted) if prefix_caching else 0


def cache_bytes(buffer_gb: float, requests: int, bytes_of_state: int, snapshots: int = 0) -> int:
    """Bytes of a buffer of some GiB left by states of `requests` and `snapshots`. UsageError: there are none."""
    buffer, states = int(buffer_gb * GIB), (requests + snapshots) * bytes_of_state
    if states and states >= buffer:
        whose = f"{requests} requests (--…-max-requests)"
        whose += f" and {snapshots} ends of prompts (--rollout-state-snapshots)" if snapshots else ""
        raise UsageError(
            f"--rollout-buffer-gb {buffer_gb:g} (of a judge --judge-buffer-gb): the states of {whose} take "
            f"{states / GIB:.3g} GiB, before any keys and values"
        )
    return buffer - states


def capacity_of(buffer_bytes: int, bytes_of_token: int, block_tokens: int) -> int:
    """Tokens that the requests of a cache can have: whole blocks, one of which Megatron keeps for padding."""
    return (max(2, buffer_bytes // (bytes_of_token * block_tokens)) - 1) * block_tokens


def check_capacity(settings, capacity: int, reporting_rank: int = 0):
    """UsageError unless a cache of `capacity` tokens holds the longest sequence."""
    longest = settings.max_prompt_length + settings.max_response_length
    if capacity < longest:
        raise UsageError(
            f"--rollout-buffer-gb {settings.rollout_buffer_gb}: the KV cache holds one sequence of {capacity} tokens; "
            f"--max-prompt-length + --max-response-length is {longest}",
            reporting_rank,
        )
