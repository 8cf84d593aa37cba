"""The plan of a role map: sizes, parameters, memory and traffic of every role, the KV cache of the rollout's replicas,
and the memory of every rank; what a run needs with further flags, without process groups.
"""

import argparse
import itertools
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from typing import NamedTuple

import numpy as np

from megarl import arguments
from megarl.comm import role_mesh
from megarl.flags import role_flags
from megarl.flags.distillation import LOSS
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
from megarl.mcore.model.weight_table import padded_vocab_size
from megarl.mcore.parallel.process_groups import fake_world
from megarl.planning import additions, parameters, traffic
from megarl.planning.memory import GIB, Memory, average_bytes, stage_memory
from megarl.planning.parameters import SCALAR_HEAD, ParameterTotals, parameter_totals

# How each role uses its model; a reward role with verifiers only has none, and that of a judge is a "judge".
KINDS = dict(
    actor="train", critic="value", reward="reward model", reference="score", teacher="score", rollout="generate"
)
PREFILL = 4096  # minimum token budget of a prefill of the rollout engine


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


def cache_plan(role, settings, step: traffic.StepSizes) -> CachePlan:
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
        from megarl.mcore.any_model.attention import mean_cache  # needs transformers

        reach = args.model_folder.reach()
        config.num_query_groups, config.kv_channels = mean_cache(reach.slots, sizes.tensor)
        states = [bytes_of_shapes(reach.state_shapes)]
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


@dataclass(frozen=True)
class RolePlan:
    """One role. `parameters` is None if it has no model; `stages` is the memory per rank of each pipeline stage."""

    name: str
    ranks: range
    model_role: str
    sizes: dict[str, int | bool]
    parameters: ParameterTotals | None
    stages: list[Memory]
    vocab_size: int
    microbatches: int  # of an update, on each data-parallel replica
    traffic: dict[str, int]
    kind: str | None = None  # of `kind_of`
    cache: CachePlan | None = None  # of a rollout

    @property
    def largest(self) -> Memory:
        """Memory of the fullest stage."""
        return max(self.stages, key=lambda memory: memory.total)

    def memory_on(self, rank: int) -> Memory:
        """Memory on one of the role's ranks."""
        return self.stages[(rank - self.ranks.start) * len(self.stages) // len(self.ranks)]


@dataclass(frozen=True)
class RankSet:
    """Ranks with the same roles: their number, the fullest of them, and its bytes for all roles together."""

    roles: tuple[str, ...]
    ranks: int
    fullest: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The report of `python -m megarl.plan`."""

    world_size: int
    vocab_size: int
    padded_vocab_size: int
    step: traffic.StepSizes
    roles: dict[str, RolePlan]
    rank_sets: list[RankSet]
    exchanges: list[dict]
    weights_to_rollout: int
    weights_to_reference: int
    images: dict[str, int] | None = None  # as of `additions.images_of`


def make_plan(
    program, world_size: int, vocab_size: int, reward_vocab_size: int | None = None, image_tokens: int | None = None
) -> Plan:
    """The plan of a parsed program. Creates its process groups in a fake world; uses no GPU.

    `reward_vocab_size`: of a reward model with another tokenizer; `image_tokens`: of the images of a prompt.
    """
    additions.check_images(program, image_tokens)
    role_groups, s = create_role_groups(program.roles, world_size), program.settings
    has_judge = program.roles["reward"].is_judge
    own_groups = additions.holds_own_groups(role_groups, s, has_judge)
    roles = role_plans(program, vocab_size, reward_vocab_size)
    exchanges = additions.early_responses(role_groups, s, has_judge, vocab_size)
    exchanges += traffic.exchanges(role_groups, s, program.teachers.state_bytes, own_groups)
    exchanges += traffic.routes(program.roles, role_groups, s)
    images = None if image_tokens is None else additions.images_of(program, image_tokens)
    exchanges += [] if images is None else additions.image_moves(program, role_groups, exchanges, images)
    return Plan(
        world_size,
        vocab_size,
        padded_vocab_size(program.roles["actor"].megatron, vocab_size),
        traffic.step_sizes(s),
        roles,
        sets_of(roles, world_size),
        exchanges,
        traffic.weights_to_rollout(program.roles, vocab_size),
        traffic.weights_to_reference(program.roles, s, vocab_size),
        images,
    )


def rollout_plan(program, vocab_size: int) -> RolePlan:
    """The plan of the rollout alone, of which the other roles' plans do not depend."""
    role, step = program.roles["rollout"], traffic.step_sizes(program.settings)
    return _role(role, program.settings, vocab_size, step, _cache(role, program.settings, step))


def role_plans(program, vocab_size: int, reward_vocab_size: int | None = None) -> dict[str, RolePlan]:
    """The plan of each role, without process groups; arguments as of `make_plan`."""
    step = traffic.step_sizes(program.settings)
    sizes = dict.fromkeys(program.roles, vocab_size) | {"reward": reward_vocab_size or vocab_size}
    # First, because a cache that is too small refuses the run: a search then spends no more time on it.
    caches = {name: _cache(role, program.settings, step) for name, role in program.roles.items()}
    settings, roles = program.settings, program.roles.items()
    plans = {name: _role(role, settings, sizes[name], step, caches[name]) for name, role in roles}
    if program.teachers.take_turns:
        plans["teacher"] = _in_turns(
            [_role(role, settings, vocab_size, step, None) for role in program.teachers.models]
        )
    copies, actor = traffic.weights_to_rollout(program.roles, vocab_size), plans["actor"]
    sent, taught = settings.generation_lag * copies // len(actor.ranks), _teacher_data(program, vocab_size, step)
    both = zip(actor.stages, taught, strict=True)
    stages = [replace(memory, sent_weights=sent, teacher_data=data) for memory, data in both]
    return plans | {"actor": replace(actor, stages=stages)}


def _teacher_data(program, vocab_size: int, step: traffic.StepSizes) -> list[int]:
    """Bytes on the ranks of each stage of the actor of what it has of the teachers, with `--distill loss`."""
    actor = program.roles["actor"]
    sizes = parallel_sizes(actor.megatron)
    if program.settings.distill != LOSS:
        return [0] * sizes.pipeline
    # The step's states, and once more those of an update's micro-batches.
    share = ceil(step.epochs / step.updates)
    states = (1 + share) * step.tokens_of_replica(sizes.data(len(actor.ranks))) * program.teachers.state_bytes
    rows = padded_vocab_size(actor.megatron, vocab_size) // sizes.tensor
    heads = [rows * role.megatron.hidden_size * role.megatron.params_dtype.itemsize for role in program.teachers.models]
    return [states] * (sizes.pipeline - 1) + [states + sum(heads)]


def _in_turns(plans: list[RolePlan]) -> RolePlan:
    """The plan of models that take turns on a role's ranks, from that of each: the largest is on the device, the host
    has copies of all, and the one with the most traffic may get all sequences of a step."""
    stages = []
    for of_models in zip(*(plan.stages for plan in plans), strict=True):
        largest = max(of_models, key=lambda memory: memory.total)
        others = sum(memory.host for memory in of_models) - largest.host
        stages.append(replace(largest, waiting=others))
    busiest = max(plans, key=lambda plan: sum(plan.traffic.values()))
    total, active, of_rank = zip(*(plan.parameters for plan in plans if plan.parameters is not None), strict=True)
    parameters = ParameterTotals(sum(total), max(active), max(of_rank))
    return replace(plans[0], stages=stages, traffic=busiest.traffic, parameters=parameters)


def create_role_groups(roles: dict, world_size: int) -> dict:
    """RoleGroups of all roles by name, created as the programs do, as seen from the first rank of a fake world."""
    with fake_world(world_size):
        return role_mesh.create_mesh(roles, timedelta(minutes=1)).roles


def _cache(role, settings, step: traffic.StepSizes) -> CachePlan | None:
    generates = kind_of(role) == "generate" and not settings.debug_train_only
    return cache_plan(role, settings, step) if generates else None


def _role(role, settings, vocab_size: int, step: traffic.StepSizes, cache: CachePlan | None) -> RolePlan:
    args, kind = role.megatron, kind_of(role)
    sizes, ranks = parallel_sizes(args), len(role.ranks)
    layout = {
        "tensor": sizes.tensor, "pipeline": sizes.pipeline, "virtual": args.virtual_pipeline_model_parallel_size or 1,
        "context": sizes.context, "data": sizes.data(ranks), "expert": sizes.expert,
        "expert_tensor": sizes.expert_tensor, "expert_data": sizes.expert_data(ranks),
        "sequence_parallel": args.sequence_parallel, "sharded": args.use_torch_fsdp2,
    }  # fmt: skip
    stages = _memory(role, settings, kind, vocab_size, step)
    count, totals, sent = 0, None, {}
    if kind in ("train", "value"):
        count = step.microbatches(sizes.data(ranks), role.max_tokens_per_microbatch)
    if kind == "judge":
        step = additions.judge_sizes(settings)
    if kind == "reward model" or role.name == "teacher":  # which may read more tokens than the policy
        step = replace(step, prompt=max(args.seq_length - step.response, 0))
    if kind is not None:
        sent = traffic.within_role(role, kind, vocab_size, step)
        totals = parameter_totals(args, vocab_size, kind in SCALAR_HEAD)
    return RolePlan(
        role.name, role.ranks, role.model_role, layout, totals, stages, vocab_size, count, sent, kind, cache
    )


def kind_of(role) -> str | None:
    """How a role uses its model, of `KINDS` or "judge"; None if it has none."""
    if not role.has_model:
        return None
    return "judge" if role.is_judge else KINDS[role.name]


def _memory(role, settings, kind: str | None, vocab_size: int, step: traffic.StepSizes) -> list[Memory]:
    """Memory of a role on the ranks of each of its pipeline stages; 0 bytes if it has no model."""
    sizes, tokens, cache = parallel_sizes(role.megatron), role.max_tokens_per_microbatch, 0
    if kind is None:
        return [Memory()] * sizes.pipeline
    if kind == "generate":
        cache, tokens = int(settings.rollout_buffer_gb * GIB), max(step.prompt + step.response, PREFILL)
    if kind == "judge":
        cache, tokens = int(settings.judge_buffer_gb * GIB), max(settings.judge_max_length, PREFILL)
    count = step.microbatches(sizes.data(len(role.ranks)), role.max_tokens_per_microbatch)
    stages = stage_memory(role, vocab_size, kind, tokens, count, cache)
    if kind == "train" and settings.ema_decay is not None:
        averages = average_bytes(role, vocab_size, kind)
        stages = [replace(memory, average=size) for memory, size in zip(stages, averages, strict=True)]
    models = models_of(role, settings)
    return [replace(memory, weights=models * memory.weights) for memory in stages]


def models_of(role, settings) -> int:
    """Models that a role runs one after another: those of an ensemble of reward models."""
    return len((settings.reward_model or "").split(",")) if role.name == "reward" else 1


def sets_of(roles: dict[str, RolePlan], world_size: int) -> list[RankSet]:
    """Sets of ranks with the same roles; bytes: resident of all roles, the largest transient, as roles take turns."""
    resident, transient = np.zeros(world_size, dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    for role in roles.values():
        own, stage_size = slice(role.ranks.start, role.ranks.stop), len(role.ranks) // len(role.stages)
        resident[own] += np.repeat([m.resident for m in role.stages], stage_size)
        transient[own] = np.maximum(transient[own], np.repeat([m.transient for m in role.stages], stage_size))
    total = resident + transient
    # Between two neighbouring ends of ranges all ranks have the same roles.
    ends = {0, world_size, *(end for role in roles.values() for end in (role.ranks.start, role.ranks.stop))}
    sets: dict[tuple[str, ...], list[range]] = {}
    for start, stop in itertools.pairwise(sorted(ends)):
        names = tuple(name for name, role in roles.items() if start in role.ranks)
        sets.setdefault(names, []).append(range(start, stop))
    result = []
    for names, parts in sets.items():
        candidates = (part.start + int(total[part.start : part.stop].argmax()) for part in parts)
        fullest = max(candidates, key=total.__getitem__)
        result.append(RankSet(names, sum(map(len, parts)), fullest, int(total[fullest])))
    return result


# -- a run that is to be planned, with the flags that a plan may add ---------------------------------------------------


class Price(NamedTuple):
    """A parsed run with the plan of each role and the memory of every set of ranks."""

    program: arguments.RunConfig
    roles: dict[str, RolePlan]
    rank_sets: list[RankSet]

    @property
    def fullest(self) -> RankSet:
        """The set with the fullest rank."""
        return max(self.rank_sets, key=lambda rank_set: rank_set.bytes)


@dataclass(frozen=True)
class Question:
    """Flags of train_rl and the ranks that they are for; a later flag wins."""

    flags: list[str]
    world_size: int
    ranks_per_node: int | None  # None: role maps name no nodes
    vocab_size: int = 0
    reward_vocab_size: int | None = None  # of a reward model with another tokenizer
    image_tokens: int | None = None  # of the images of a prompt; None: prompts have none

    def program(self, more: tuple[str, ...] = ()) -> arguments.RunConfig:
        """The run with further flags, parsed and checked as the run itself does. UsageError for wrong ones."""
        with fake_world(self.world_size):
            program = arguments.parse([*self.flags, *more], self.world_size, ranks_per_node=self.ranks_per_node)
        role_flags.check_microbatches(program)
        parameters.check_patterns(program)
        return program

    def price(self, more: tuple[str, ...] = ()) -> Price:
        """What the run with further flags needs. UsageError for flags that the run refuses."""
        return self._price(self.program(more))

    def with_cache(self, price: Price, size: float) -> Price:
        """What a run that is priced needs with `--rollout-buffer-gb size`, which nothing else depends on."""
        settings = replace(price.program.settings, rollout_buffer_gb=size)
        program = replace(price.program, settings=settings)
        roles = price.roles | {"rollout": rollout_plan(program, self.vocab_size)}
        return Price(program, roles, sets_of(roles, self.world_size))

    def with_recompute(self, price: Price, granularity: str | None) -> Price:
        """What a run that is priced needs with another `--recompute-granularity`, not full."""
        values = {"recompute_granularity": granularity, "recompute_method": None, "recompute_num_layers": None}
        roles = {
            name: replace(role, megatron=argparse.Namespace(**vars(role.megatron) | values))
            for name, role in price.program.roles.items()
        }
        return self._price(replace(price.program, roles=roles))

    def _price(self, program: arguments.RunConfig) -> Price:
        roles = role_plans(program, self.vocab_size, self.reward_vocab_size)
        return Price(program, roles, sets_of(roles, self.world_size))
