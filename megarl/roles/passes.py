"""Passes of a role's model over micro-batches, with what a micro-batch knows of its routes and shared prompts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.batch import Batch
from megarl.mcore import device
from megarl.mcore.attention import packing
from megarl.mcore.model import forward_pass
from megarl.mcore.parallel import pipeline
from megarl.router_replay.router_state import Microbatches


def run_microbatches(stages, microbatches: Microbatches, forward, loss, pg_collection, train: bool) -> list:
    """Results of `loss(forward(chunk, micro-batch), micro-batch)`, as of `pipeline.run_microbatches`."""
    batches = [microbatch for microbatch, _ in microbatches]
    hosts, is_sequence_parallel = [each.host_metadata for each in batches], stages[0].config.sequence_parallel
    rows = [packing.hidden_rows(host.lengths, host.shared, pg_collection, is_sequence_parallel) for host in hosts]
    return pipeline.run_microbatches(stages, batches, forward, loss, pg_collection, train, rows=rows)


def forward_only(stages, microbatches: Microbatches, forward, pg_collection) -> list:
    """Runs `forward(chunk, micro-batch)` without gradients: [(result, positions)] on every rank."""
    with forward_pass.inference_mode(stages):
        results = run_microbatches(stages, microbatches, forward, _as_result, pg_collection, train=False)
    return [(result, positions) for result, (_, positions) in zip(results, microbatches, strict=True)]


def _as_result(output, microbatch):
    # Where the model is: with experts Megatron multiplies it by the optimizer's loss scale.
    return torch.zeros((), device=device.device()), output


def policy_scores(
    chunk, microbatch: Batch, temperature: float, vocab_size: int, teachers: Sequence[forward_pass.TeacherRows] = (),
    only_distills: bool = False, learner: Callable | None = None, squares: bool = False,
):  # fmt: skip
    """What `TokenScorer` returns for the response tokens, after what the micro-batch knows of its routes and shared
    prompts; `learner`: as of `forward_pass.run_chunk`."""
    host = microbatch.host_metadata
    scorer = forward_pass.TokenScorer(temperature, vocab_size, host.response_mask, teachers, only_distills, squares)
    return forward_pass.run_chunk(
        chunk, microbatch.tokens, host.lengths, scorer, microbatch.routing, host.shared, learner
    )


def token_states(chunk, microbatch: Batch) -> Tensor:
    """Hidden states of the response tokens, as of `forward_pass.token_states`."""
    host, routing = microbatch.host_metadata, microbatch.routing
    return forward_pass.token_states(chunk, microbatch.tokens, host.lengths, routing, host.response_mask, host.shared)


def token_values(chunk, microbatch: Batch) -> Tensor:
    """[T] values of a critic."""
    host = microbatch.host_metadata
    return forward_pass.token_values(chunk, microbatch.tokens, host.lengths, microbatch.routing, host.shared)


def sequence_scores(chunk, microbatch: Batch) -> Tensor:
    """[N] scores of a reward model."""
    host = microbatch.host_metadata
    return forward_pass.sequence_scores(chunk, microbatch.tokens, host.lengths, microbatch.routing, host.shared)
