"""The KV cache of a rollout replica: as tokens, as sequences of full length, and as rounds of a step's responses."""

from dataclasses import dataclass
from math import ceil

from megarl.mcore.config.megatron_flags import parallel_sizes, transformer_config
from megarl.mcore.inference.cache_size import (
    BLOCK_TOKENS_CUDA,
    bytes_of_shapes,
    cache_bytes,
    capacity_of,
    check_capacity,
    snapshot_count,
    state_bytes,
    token_bytes,
)
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.model.pipeline_layout import layer_kinds, prediction_kind, stage_layers
from megarl.planning.traffic import StepSizes


@dataclass(frozen=True)
class CachePlan:
    """What the cache of a data-parallel replica holds, every sequence at its longest, prompts not shared."""

    token_bytes: int  # on a rank of the pipeline stage with most layers with keys and values
    state_bytes: int  # of a request's recurrent states, on a rank of the stage with most
    states: int  # of requests and of ends of prompts, before the first token
    tokens: int
    longest: int  # tokens of prompt and response
    full_length: int  # such sequences that fit at a time
    decoded: int  # that are decoded at a time, at most `--rollout-max-requests`
    responses: int  # of a step, generated in `rounds`
    rounds: int


def cache_plan(role, settings, step: StepSizes) -> CachePlan:
    """The cache of the rollout's replicas on CUDA, whose blocks have 64 tokens. UsageError, with the line of the run,
    if it does not hold one sequence."""
    args, sizes = role.megatron, parallel_sizes(role.megatron)
    config, kinds = transformer_config(args), layer_kinds(args)
    max_requests = ceil(max(settings.rollout_max_requests, MIN_ROWS) / sizes.tensor) * sizes.tensor
    stages = [[kinds[layer] for chunk in chunks for layer in chunk] for chunks in stage_layers(args)]
    counts = [sum(kind.is_recurrent for kind in stage) for stage in stages]
    states = [state_bytes(config, count, sizes.tensor) if count else 0 for count in counts]
    further = [prediction_kind(args).has_indexer] * int(settings.mtp_drafts)  # its layer has keys and values, too
    cached = [[kind.has_indexer for kind in stage if kind.has_mixer and not kind.is_recurrent] for stage in stages]
    if args.model_folder is not None:
        config.num_query_groups, config.kv_channels = args.model_folder.mean_cache(sizes.tensor)
        states = [bytes_of_shapes(args.model_folder.state_shapes())]
    tokens_of = [token_bytes(config, (own or [False]) + further, sizes.tensor) for own in cached]
    snapshots = snapshot_count(max_requests, settings.rollout_prefix_caching, settings.rollout_state_snapshots)
    buffers = [cache_bytes(settings.rollout_buffer_gb, max_requests, state, snapshots) for state in states]
    tokens = min(capacity_of(buffer, size, BLOCK_TOKENS_CUDA) for buffer, size in zip(buffers, tokens_of, strict=True))
    check_capacity(settings, tokens)
    longest = step.prompt + step.response
    full_length = tokens // BLOCK_TOKENS_CUDA // ceil(longest / BLOCK_TOKENS_CUDA)
    responses = ceil(step.with_greedy().sequences / sizes.data(len(role.ranks)))
    decoded = min(full_length, max_requests, responses)
    rounds, count = ceil(responses / decoded), max_requests + snapshots
    return CachePlan(max(tokens_of), max(states), count, tokens, longest, full_length, decoded, responses, rounds)
