"""Forward passes of a model chunk over one packed micro-batch: log-probs and entropies, values, sequence scores.

Only this module splits a micro-batch for context and sequence parallelism and gathers the results.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.inference.utils import InferenceMode
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore import device
from megarl.mcore.attention import backends
from megarl.mcore.attention.packing import PackedLayout, pack_sequences, scored_tokens
from megarl.mcore.attention.segments import window_of
from megarl.mcore.config.recurrent_rules import has_states
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact
from megarl.mcore.kernels.head import HeadOptions
from megarl.mcore.kernels.head_divergence import DistillScores, Taught, TeacherHead, head_divergence
from megarl.mcore.kernels.head_scores import head_scores, head_top_logprobs
from megarl.mcore.model.gpt import ValueHead
from megarl.mcore.moe.routes import Routing
from megarl.mcore.parallel.context_parallel import gather_result
from megarl.mcore.vision.store import share


class TokenScores(NamedTuple):
    """Scores of packed tokens under a language model; all [T] fp32, 0 at tokens that were not requested.

    What is absent is empty, since pipeline stages exchange tensors alone.
    """

    logprobs: Tensor
    entropy: Tensor
    squares: Tensor | tuple[()] = ()  # Σπ² over the vocabulary, if it was requested
    distillation: DistillScores | tuple[()] = ()  # the comparison with the tokens' teachers, if they have any


class TeacherRows(NamedTuple):
    """A micro-batch's teacher, or one of several."""

    states: Tensor  # [T, H_T] its hidden states before each token
    head: TeacherHead  # its output layer
    tokens: np.ndarray | None = None  # [T] bool on the host, the tokens that it teaches; None: all


def align_to_tokens(next_token_values: Tensor, packing: PackedLayout) -> Tensor:
    """Shifts values of each stream position's next token onto that token -> [T, …]; 0 at first tokens of sequences."""
    shifted = torch.cat([torch.zeros_like(next_token_values[:1]), next_token_values[:-1]])
    aligned = shifted.index_fill(0, packing.first, 0.0)
    return aligned if packing.source is None else aligned.index_select(0, packing.source)


def gather_stream(local: Tensor, packing: PackedLayout) -> Tensor:
    """Gathers results of this rank's tokens to those of the whole stream, without its padding."""
    if packing.order is not None:
        local = gather_result(local, packing.cp_group)[packing.order]
    return local[: packing.tokens]


def run_chunk(
    chunk, tokens: Tensor, lengths: Tensor, processor: Callable, routing: Routing | None, shared, learner=None
):
    """Returns hidden states [T', 1, H] of a chunk; from the last chunk, what `processor` returns for them.

    `learner`: called before it, with (hidden states [T', H], output layer, its weight, packing, model).
    """
    if InferenceMode.is_active():
        raise RuntimeError("a training forward while the rollout engine is active: suspend the engine first")
    model = chunk.module if hasattr(chunk, "module") else chunk  # with or without the gradient-buffer wrapper
    pg_collection, sequence_parallel = model.pg_collection, model.config.sequence_parallel
    tensor_ranks = dist.get_world_size(pg_collection.tp) if sequence_parallel else 1
    recurs = has_states(model.config) or model.config.state_shapes
    taps = model.config.linear_conv_kernel_dim if recurs else None
    plan, window = backends.load(model.config).plan_attention, window_of(model.config)
    packing = pack_sequences(lengths, pg_collection.cp, tensor_ranks, routing, shared, window, plan, taps)
    if model.images is None and tokens.device.type == "cpu":
        torch._assert_async(
            (tokens >= 0).all(), "a token stream has rows of images, and this model has no store of them"
        )
    share(model, tokens, pg_collection.tp_cp)
    axes = None if model.images is None else model.images.packed_positions(tokens, lengths)
    tokens = tokens if packing.held is None else tokens.index_select(0, packing.held)
    padded = torch.cat([tokens, tokens.new_zeros(packing.padding)])
    if axes is not None:
        axes = axes if packing.held is None else axes.index_select(1, packing.held)
        packing.axis_positions = pad(axes, (0, packing.padding)).index_select(1, packing.token_indices)
    if model.images is not None:
        packing.images = model.images.feature_rows(padded[packing.token_indices])
    next_tokens = torch.cat([padded[1:], padded[:1]])

    def process(hidden_states, output_layer, output_weight, **_):
        weight = output_layer.weight if output_weight is None else output_weight
        targets = next_tokens[packing.token_indices]
        if learner is not None:
            learner(hidden_states.squeeze(1), output_layer, weight, packing, model)
        return processor(hidden_states.squeeze(1), output_layer, weight, targets, packing, model)

    return chunk(
        padded[packing.token_indices].unsqueeze(0),
        packing.positions.unsqueeze(0),
        None,
        packed_seq_params=packing,
        output_processor=process,
    )


@dataclasses.dataclass(frozen=True)
class TokenScorer:
    """What `run_chunk` does to score a micro-batch's tokens."""

    temperature: float  # of the softmax, as in the rollout
    vocab_size: int  # the tokenizer's vocabulary
    mask: Tensor | None = None  # [T] bool on the host, the tokens to score; None: all except the first of each sequence
    # Whose distributions are compared with the model's; each token has one, if there are any.
    teachers: Sequence[TeacherRows] = ()
    only_distills: bool = False  # log-probs and entropies need no gradient
    squares: bool = False  # also Σπ², which takes two more passes over the logits; without teachers

    def __call__(self, hidden, output_layer, weight, targets, packing, model):
        """`TokenScores` of the whole micro-batch from hidden states of this rank's tokens."""
        options = _head_options(output_layer, model, self.temperature, self.vocab_size)
        scored = None if self.mask is None else scored_tokens(self.mask, packing)
        rows = None if scored is None or len(targets) <= MIN_ROWS else scored.rows
        is_text = None if model.images is None else targets >= 0
        row_targets = (targets if rows is None else targets[rows]).clamp(min=0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.only_distills):
            logprobs, entropy, square_sums = head_scores(hidden, weight, row_targets, options, rows, self.squares)

        def aligned(score: Tensor) -> Tensor:
            if scored is not None:
                requested = score.index_select(0, scored.requested_of_scored)
                score = score.new_zeros(len(targets)).index_copy(0, scored.requested, requested)
            score = score if is_text is None else score.where(is_text, 0.0)  # rows of images have no log-prob
            return align_to_tokens(gather_stream(score, packing), packing)

        scores = TokenScores(aligned(logprobs), aligned(entropy))
        if not self.teachers:
            return scores._replace(squares=aligned(square_sums)) if self.squares else scores
        places = packing.next_tokens if rows is None else packing.next_tokens[rows]
        if self.teachers[0].tokens is None:
            taught: list[Taught] = [(None, self.teachers[0].states[places], self.teachers[0].head)]
        else:
            host_places = packing.host_next_tokens if rows is None else packing.host_next_tokens[scored.host_rows]
            taught = _taught_rows(self.teachers, places, host_places)
        divergences = head_divergence(hidden, weight, taught, row_targets, options, rows)
        return scores._replace(distillation=DistillScores(*map(aligned, divergences)))


def token_scores(
    chunk, tokens: Tensor, lengths: Tensor, temperature: float, vocab_size: int, routing=None, mask=None, shared=None
):
    """Returns log-probabilities and entropies of packed tokens under a language model.

    Args:
        chunk: one of a model's `ModelChunks`, or its gradient-buffer wrapper.
        tokens: [T] int64, sequences packed one after another.
        lengths: [N] int64, each at least 1, on the host.
        temperature, vocab_size, mask: as of `TokenScorer`.
        routing: `Routing` of this micro-batch to replay or record; None: the routers choose the experts.
        shared: the `SharedPrefix` of sequences: it is computed once, with results equal to the last bit.

    Returns:
        TokenScores from a model's last chunk; hidden states for the next stage from other chunks.
    """
    return run_chunk(chunk, tokens, lengths, TokenScorer(temperature, vocab_size, mask), routing, shared)


def _head_options(output_layer, model, temperature: float, vocab_size: int) -> HeadOptions:
    c, group = model.config, output_layer.tp_group
    return HeadOptions(temperature, vocab_size, group, c.sequence_parallel, c.final_logit_softcapping, is_exact(c))


def _taught_rows(teachers: Sequence[TeacherRows], places: Tensor, host_places: np.ndarray) -> list[Taught]:
    """The rows of each teacher. `places`: [n] int64, the token of each row; also on the host."""
    rows = device.to_device([np.flatnonzero(teacher.tokens[host_places]) for teacher in teachers])
    return [(at, each.states[places[at]], each.head) for each, at in zip(teachers, rows, strict=True)]


def top_scores(chunk, tokens: Tensor, lengths: Tensor, temperature: float, vocab_size: int, count: int):
    """Returns log-probs of packed tokens that a client sends, and the `count` most likely tokens in their places.

    Args:
        chunk, tokens, lengths, temperature, vocab_size: as of `token_scores`.
        count: 0: log-probs alone.

    Returns:
        (log-probs [T], top tokens [T, k], their log-probs [T, k]) from a model's last chunk, 0 at the first token of
        each sequence; k ≤ count. Hidden states for the next stage from other chunks.
    """

    def processor(hidden, output_layer, weight, targets, packing, model):
        options = _head_options(output_layer, model, temperature, vocab_size)
        logprobs = head_scores(hidden, weight, targets.clamp(min=0), options, squares=False).logprobs
        logprobs = logprobs.where(targets >= 0, 0.0)  # rows of images have none

        def aligned(values: Tensor) -> Tensor:
            return align_to_tokens(gather_stream(values, packing), packing)

        best = head_top_logprobs(hidden, weight, count, options) if count else ()
        best = [torch.stack([aligned(column) for column in values.unbind(-1)], dim=-1) for values in best]
        empty = logprobs.new_zeros(len(tokens), 0)
        return (aligned(logprobs), *best) if best else (aligned(logprobs), empty.long(), empty)

    return run_chunk(chunk, tokens, lengths, processor, None, None)


def token_states(chunk, tokens: Tensor, lengths: Tensor, routing=None, mask: Tensor | None = None, shared=None):
    """Returns [T, H] hidden states before each token, after the final norm; 0 at tokens that were not requested. Hidden
    states for the next stage from other chunks than the last. Arguments as of `token_scores`."""

    def processor(hidden, output_layer, weight, targets, packing, model):
        if model.config.sequence_parallel:
            hidden = gather_result(hidden, output_layer.tp_group)
        states = align_to_tokens(gather_stream(hidden, packing), packing)
        return states if mask is None else states.masked_fill_(~device.to_device([mask.numpy()])[0].unsqueeze(-1), 0)

    return run_chunk(chunk, tokens, lengths, processor, routing, shared)


def token_values(chunk, tokens: Tensor, lengths: Tensor, routing=None, shared=None) -> Tensor:
    """Returns [T] values of the states before each token, 0 at first tokens; hidden states from other than the last
    chunk. Arguments as of `token_scores`."""
    return run_chunk(chunk, tokens, lengths, _of_scalar_head(align_to_tokens), routing, shared)


def sequence_scores(chunk, tokens: Tensor, lengths: Tensor, routing=None, shared=None) -> Tensor:
    """Returns [N] fp32 scores of sequences: the scalar head at each last token; hidden states from other than the last
    chunk. Arguments as of `token_scores`."""
    of_last = _of_scalar_head(lambda values, packing: values[packing.last])
    return run_chunk(chunk, tokens, lengths, of_last, routing, shared)


def _of_scalar_head(result: Callable[[Tensor, PackedLayout], Tensor]) -> Callable:
    """The processor that returns `result` of the scalar head's values [T] of the whole stream."""

    def processor(hidden, head: ValueHead, weight, targets, packing, model):
        values = head(hidden)
        values = gather_result(values, head.group) if model.config.sequence_parallel else values
        return result(gather_stream(values, packing), packing)

    return processor


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode, and in its own mode afterwards."""
    was_training = model.training
    if was_training:  # a change of the mode visits every module
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


@contextlib.contextmanager
def inference_mode(stages):
    """Context with the model in eval mode and without gradients; restores its training mode afterwards."""
    with eval_mode(stages), torch.no_grad():
        yield stages
