"""Walks the phases of a step of train_rl for one rank of each role, with the shapes of the real model."""

import functools
from collections.abc import Iterator
from datetime import timedelta
from math import ceil
from typing import NamedTuple

import torch

from megarl.comm import role_mesh
from megarl.errors import UsageError
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.parallel.process_groups import fake_world
from megarl.planning import summary, traffic
from megarl.planning.summary import Price
from tests.cuda_walk import parallel
from tests.cuda_walk.cost.log import Log
from tests.cuda_walk.cost.timeline import Collective
from tests.cuda_walk.device import Walk

VOCAB = 1000  # tokens of prompts
DECODED = 6  # tokens: the first step of a bucket runs kernel by kernel, the second is captured, the third a replay


class Phase(NamedTuple):
    """What one call of a phase does, and how many calls a step of the run has; `is_step`: of the rollout engine."""

    role: str
    name: str
    calls: int
    events: list
    is_step: bool = False


def check(program):
    """UsageError for a run of which this would miss a part."""
    for name, role in program.roles.items():
        args = role.megatron
        for flag, value, default in (
            ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size, 1),
            ("--context-parallel-size", args.context_parallel_size, 1),
            ("--use-torch-fsdp2", args.use_torch_fsdp2, False),
            ("--optimizer-cpu-offload", args.optimizer_cpu_offload, False),
            ("--lora-rank", role.lora and role.lora.rank, None),
            ("--speculative-rollout", program.settings.speculative_rollout, False),
        ):
            if role.has_model and value != default:
                raise UsageError(f"{flag} {value} ({name}): its cost is not predicted; leave it out")


def walk_all(walk: Walk, price: Price, world_size: int) -> Iterator[Phase]:
    """All phases of a step, of the first rank of each role; every response has its full length."""
    walk.log = Log()
    parallel.send_evenly()
    parallel.agree()
    for name, plan in price.roles.items():
        role = price.program.roles[name]
        if role.has_model and (name != "rollout" or plan.cache is not None):
            with fake_world(world_size, plan.ranks.start):
                groups = role_mesh.create_mesh(price.program.roles, timedelta(minutes=1))[name].pg_collection
                walks = _rollout if name == "rollout" else _passes
                yield from walks(walk.log, price.program.settings, role, plan, groups)
    rollout = price.roles["rollout"]
    sent = traffic.weights_to_rollout(price.program.roles, rollout.vocab_size) / len(rollout.ranks)
    if sent:  # the plan's bytes: ranks agree on shards by messages that nobody sends here
        yield Phase("rollout", "weights", 1, [Collective("weights", sent, world_size)])


def _rollout(log: Log, settings, role, plan: summary.RolePlan, groups) -> Iterator[Phase]:
    """A decode step of as many requests as are decoded at a time, at half of their responses; and a prefill step."""
    from megarl.mcore.inference import device_decode
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.model import gpt

    device_decode.MAX_AHEAD = 0  # a step launched before the last one was read has no beginning of its own to measure
    cache, step = plan.cache, traffic.step_sizes(settings)
    (model,) = gpt.build_frozen_model(role.megatron, plan.vocab_size, groups)
    engine = RolloutEngine(
        model, groups, plan.vocab_size, step.prompt + step.response, settings.rollout_buffer_gb, cache.decoded,
        decode_graphs=settings.decode_graphs == "auto",
    )  # fmt: skip
    log.requests, log.keys = cache.decoded, step.prompt + step.response // 2
    *_, decode = _steps(log, engine, cache.decoded, 1, DECODED)
    yield Phase("rollout", f"decode step of {cache.decoded}", cache.rounds * step.response, decode, True)
    prompts = ceil(settings.prompts_per_step / parallel_sizes(role.megatron).data(len(plan.ranks)))
    at_once = min(prompts, max(1, engine.step_tokens // step.prompt))
    prefill, *_ = _steps(log, engine, at_once, step.prompt, 1)
    yield Phase("rollout", f"prefill of {at_once * step.prompt}", ceil(prompts / at_once), prefill, True)


def _steps(log: Log, engine, count: int, length: int, new_tokens: int) -> list[list]:
    """What each step of the engine does for so many requests."""
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.generation import GenerationRequest

    real, found = engine.engine.step_modern, []

    def step():
        log.take()
        result = real()
        found.append(log.take())
        return result

    engine.engine.step_modern = step
    try:
        # Prompts differ, as equal ones are read once.
        requests = [GenerationRequest([key % VOCAB] * length, key, new_tokens) for key in range(count)]
        engine.generate(requests, (), SamplingSettings())
    finally:
        engine.engine.step_modern = real
    return found


def _passes(log: Log, settings, role, plan: summary.RolePlan, groups) -> Iterator[Phase]:
    """Scores of a micro-batch; its forward and backward, and the optimizer's step, of a role that trains."""
    from megarl.mcore.model import gpt
    from megarl.mcore.parallel import pipeline
    from megarl.mcore.training import optimizer
    from megarl.roles.passes import forward_only

    args, step = role.megatron, traffic.step_sizes(settings)
    has_scalar_head, trains = summary.KINDS[plan.name] in ("value", "reward model"), plan.microbatches > 0
    stages = (gpt.build_model if trains else gpt.build_frozen_model)(args, plan.vocab_size, groups, has_scalar_head)
    microbatch, count = _microbatch(role, plan, step)
    scores = functools.partial(_values if has_scalar_head else _logprobs, settings, plan.vocab_size)
    forwards, backwards = traffic.passes(plan.name, args, step)
    scored = forwards - backwards * (2 if args.recompute_granularity == "full" else 1)
    tokens, starts = len(microbatch.tokens), []
    if trains:
        wrapped = optimizer.wrap_for_training(stages, args, groups)
        adam = optimizer.build_optimizer(wrapped, args, groups)
    log.take()
    if scored:
        forward_only(stages, [(microbatch, None)], scores, groups)
        yield Phase(plan.name, f"scores of {tokens}", scored * count, log.take())
    if not trains:
        return

    def forward(chunk, part):
        starts.append(len(log.events))
        return scores(chunk, part)

    last, all_ = step.updates, backwards * count
    pipeline.run_microbatches(wrapped, [microbatch] * (1 + (all_ > last)), forward, _loss, groups, True)
    events = log.take()
    if all_ > last:
        yield Phase(plan.name, f"forward, backward of {tokens}", all_ - last, events[: starts[1]])
    yield Phase(plan.name, f"the last of an update of {tokens}", last, events[starts[-1] :])
    optimizer.update(adam)
    yield Phase(plan.name, "optimizer", last, log.take())


def _microbatch(role, plan: summary.RolePlan, step: traffic.StepSizes):
    """A full micro-batch of sequences of full length; how many of them a replica's share of the batch has."""
    from megarl.batch import Batch
    from megarl.comm import microbatches
    from tests.cuda_walk.training import device_batch

    length, replicas = step.prompt + step.response, parallel_sizes(role.megatron).data(len(plan.ranks))
    sequences = ceil(step.sequences / replicas)
    at_once = min(sequences, max(1, role.max_tokens_per_microbatch // length))
    lengths = torch.full((at_once,), length)
    total = int(lengths.sum())
    mask = torch.arange(total) % length >= step.prompt
    batch = Batch(sequence_ids=torch.arange(at_once), lengths=lengths, tokens=torch.zeros(total, dtype=torch.int64),
                  response_mask=mask)  # fmt: skip
    ((built, _),) = microbatches.build_microbatches(batch, [torch.arange(at_once)])
    return device_batch(built), ceil(sequences / at_once)


def _logprobs(settings, vocab_size: int, chunk, part):
    from megarl.mcore.model import forward_pass

    known = part.host_metadata
    return forward_pass.token_scores(
        chunk, part.tokens, known.lengths, settings.temperature, vocab_size, None, known.response_mask, known.shared
    )


def _values(settings, vocab_size: int, chunk, part):
    from megarl.mcore.model import forward_pass

    return forward_pass.token_values(chunk, part.tokens, part.host_metadata.lengths, shared=part.host_metadata.shared)


def _loss(out, _):
    """A sum over tokens: losses take little time beside the model."""
    values = out.logprobs if hasattr(out, "logprobs") else out
    return values.sum(), values.detach()
