"""A wrapped model with its optimizer, and gradients accumulated over micro-batches."""

import torch

from tests.helpers.models.tiny_models import VOCAB, build_stages, ragged_tokens

LENGTHS = [7, 2, 11, 1, 4, 9]
COUNT = sum(LENGTHS)


def microbatches_of(role_groups, parts: int):
    """This replica's sequences (round robin) in `parts` micro-batches: (tokens, lengths, weights). One without a
    sequence has a token of no weight."""
    tokens, lengths = ragged_tokens(LENGTHS)
    weights = torch.linspace(-1, 2, COUNT)
    rows = list(zip(tokens.split(LENGTHS), weights.split(LENGTHS), strict=True))[
        role_groups.dp_rank :: len(role_groups.replicas)
    ]
    nothing = [(torch.zeros(1, dtype=torch.int64), torch.zeros(1))]
    groups = [rows[i::parts] or nothing for i in range(parts)]
    return [
        (torch.cat([t for t, _ in group]), torch.tensor([len(t) for t, _ in group]), torch.cat([w for _, w in group]))
        for group in groups
    ]


def forward_and_loss(value_head: bool):
    """(forward, loss) of a critic or a policy for `run_microbatches`."""
    from megarl.mcore.model.forward_pass import token_scores, token_values

    if value_head:
        return (
            lambda model, part: token_values(model, *part[:2]),
            lambda values, part: (((values - part[2]) ** 2).sum() / COUNT, len(values)),
        )
    return (
        lambda model, part: token_scores(model, *part[:2], 0.9, VOCAB),
        lambda s, part: ((-(part[2] * s.logprobs).sum() - 0.1 * s.entropy.sum()) / COUNT, len(s.logprobs)),
    )


def wrapped_model(flags, shape="llama", value_head=False):
    """(model, wrapper, optimizer, args, role groups); a value head gets random weights: 0 would stop gradients."""
    from megarl.mcore.training import optimizer

    stages, args, place = build_stages(flags, shape, value_head)
    (model,) = stages
    if value_head:
        with torch.no_grad():
            model.output_layer.weight.copy_(torch.linspace(-0.2, 0.3, 64))
    wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
    return model, wrapped, optimizer.build_optimizer(wrapped, args, place.pg_collection), args, place


def accumulate(wrapped, adam, role_groups, parts, value_head=False):
    """Forward and backward over `parts` micro-batches from zeroed gradients; returns the losses' reports."""
    from megarl.mcore.parallel import pipeline

    wrapped[0].zero_grad_buffer()
    adam.zero_grad()
    forward, loss = forward_and_loss(value_head)
    return pipeline.run_microbatches(
        wrapped, microbatches_of(role_groups, parts), forward, loss, role_groups.pg_collection, True
    )
