"""Passes of a model's chunk over a lane's packed micro-batch: log-probs and entropies, values, scores of sequences.

Context and sequence parallelism cut the micro-batch, and put results together again, here and nowhere above.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from megarl.batch import SharedPrefix
from megarl.mcore.attention.packing import PackedLayout, pack_sequences, scored_tokens
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.vocab_parallel_logprobs import head_scores
from megarl.mcore.model.value_head import ValueHead
from megarl.mcore.moe.routing import Routing
from megarl.mcore.parallel.context_parallel import gather_result


class TokenScores(NamedTuple):
    """What a language model says of packed tokens; both [T] fp32, 0 where nothing was asked."""

    logprobs: Tensor
    entropy: Tensor


def _align_to_tokens(next_token_values: Tensor, packing: PackedLayout) -> Tensor:
    """Values that speak about the following token of the stream -> [T], aligned to that token of the sequences, 0 at
    each one's first."""
    shifted = torch.cat([next_token_values.new_zeros(1), next_token_values[:-1]])
    aligned = shifted.index_fill(0, packing.first, 0.0)
    return aligned if packing.source is None else aligned.index_select(0, packing.source)


def _whole(local: Tensor, packing: PackedLayout) -> Tensor:
    """Results at this rank's tokens -> at those of the whole stream, without its padding."""
    if packing.order is not None:
        local = gather_result(local, packing.cp_group)[packing.order]
    return local[: packing.tokens]


def _head_values(hidden: Tensor, head: ValueHead, packing: PackedLayout, model) -> Tensor:
    """Of the scalar head at each token of the whole stream, from hidden states at this rank's tokens."""
    values = head(hidden)
    if model.config.sequence_parallel:
        values = gather_result(values, head.group)
    return _whole(values, packing)


def _run(chunk, tokens: Tensor, lengths: Tensor, processor, routing: Routing | None, shared: SharedPrefix | None):
    """Hidden states [T', 1, H] of a chunk, or what `processor` makes of the last one's."""
    if InferenceMode.is_active():
        raise RuntimeError("a training forward while the rollout engine is active: suspend the engine first")
    model = chunk.module if hasattr(chunk, "module") else chunk  # under gradient buffers or alone
    groups, sequence_parallel = model.pg_collection, model.config.sequence_parallel
    packing = pack_sequences(
        lengths, groups.cp, dist.get_world_size(groups.tp) if sequence_parallel else 1, routing, shared
    )
    tokens = tokens if packing.held is None else tokens.index_select(0, packing.held)
    padded = torch.cat([tokens, tokens.new_zeros(packing.padding)])
    following = torch.cat([padded[1:], padded[:1]])

    def process(hidden_states, output_layer, output_weight, **_):
        weight = output_layer.weight if output_weight is None else output_weight
        return processor(hidden_states.squeeze(1), output_layer, weight, following[packing.places], packing, model)

    return chunk(
        padded[packing.places].unsqueeze(0),
        packing.positions.unsqueeze(0),
        None,
        packed_seq_params=packing,
        output_processor=process,
    )


def token_scores(
    chunk, tokens: Tensor, lengths: Tensor, temperature: float, vocab_size: int, routing: Routing | None = None,
    mask: Tensor | None = None, shared: SharedPrefix | None = None,
):  # fmt: skip
    """Log-probabilities and entropies of packed tokens under a language model.

    Args:
        chunk: one of a model's `ModelChunks`, or its gradient-buffer wrapper.
        tokens: [T] int64, sequences behind each other.
        lengths: [N] int64, each at least 1, on the host.
        temperature: of the softmax, as in the rollout.
        vocab_size: the tokenizer's vocabulary.
        routing: what the routers do with this micro-batch; None: they choose the experts.
        mask: [T] bool on the host, the tokens of which scores are wanted; None: of all but each sequence's first.
        shared: which sequences begin alike: what they share is computed once, the same to the last bit.

    Returns:
        TokenScores from a model's last chunk, hidden states for the next stage from others.
    """

    def processor(hidden, output_layer, weight, targets, packing, model):
        """TokenScores of the lane's micro-batch from hidden states at this rank's tokens."""
        group, sequence_parallel = output_layer.tp_group, model.config.sequence_parallel
        chosen = None if mask is None else scored_tokens(mask, packing)
        places = None if chosen is None or len(targets) <= MIN_ROWS else chosen.places
        asked = targets if places is None else targets[places]
        logprobs, entropy, _ = head_scores(
            hidden, weight, asked, temperature, vocab_size, group, sequence_parallel, places, squares=False
        )

        def aligned(score: Tensor) -> Tensor:
            if chosen is not None:
                asked_for = score.index_select(0, chosen.inside)
                score = score.new_zeros(len(targets)).index_copy(0, chosen.wanted, asked_for)
            return _align_to_tokens(_whole(score, packing), packing)

        return TokenScores(aligned(logprobs), aligned(entropy))

    return _run(chunk, tokens, lengths, processor, routing, shared)


def token_values(
    chunk, tokens: Tensor, lengths: Tensor, routing: Routing | None = None, shared: SharedPrefix | None = None
) -> Tensor:
    """[T] values of the states before each token, 0 at first tokens; hidden states from all but the last chunk."""

    def processor(hidden, output_layer, weight, targets, packing, model):
        return _align_to_tokens(_head_values(hidden, output_layer, packing, model), packing)

    return _run(chunk, tokens, lengths, processor, routing, shared)


def sequence_scores(
    chunk, tokens: Tensor, lengths: Tensor, routing: Routing | None = None, shared: SharedPrefix | None = None
) -> Tensor:
    """[N] fp32 scores of whole sequences: the scalar head at each one's last token; from others than a model's last
    chunk hidden states. Arguments as of `token_scores`."""

    def processor(hidden, output_layer, weight, targets, packing, model):
        return _head_values(hidden, output_layer, packing, model)[packing.last]

    return _run(chunk, tokens, lengths, processor, routing, shared)


@contextlib.contextmanager
def inference_mode(stages):
    """The model in eval mode without gradients, back in training mode behind it."""
    was_training = stages.training
    stages.eval()
    try:
        with torch.no_grad():
            yield stages
    finally:
        stages.train(was_training)
