"""Log-probs of given tokens and of the most likely tokens in their places, for sequences that a client sends."""

import torch
from torch import Tensor

from megarl.mcore.kernels.batch_invariance import is_exact
from megarl.mcore.kernels.top_logprobs import head_top_logprobs
from megarl.mcore.kernels.vocab_parallel_logprobs import head_scores
from megarl.mcore.model.forward_pass import align_to_tokens, gather_stream, run_chunk


def top_scores(chunk, tokens: Tensor, lengths: Tensor, temperature: float, vocab_size: int, count: int):
    """Returns log-probs of packed tokens, and the `count` most likely tokens in their places.

    Args:
        chunk, tokens, lengths, temperature, vocab_size: as of `token_scores`.
        count: 0: log-probs alone.

    Returns:
        (log-probs [T], top tokens [T, k], their log-probs [T, k]) from a model's last chunk, 0 at the first token of
        each sequence; k ≤ count. Hidden states for the next stage from other chunks.
    """

    def processor(hidden, output_layer, weight, targets, packing, model):
        """The results for the whole micro-batch from hidden states of this rank's tokens."""
        group, is_split = output_layer.tp_group, model.config.sequence_parallel
        softcap = model.config.final_logit_softcapping
        logprobs = head_scores(
            hidden, weight, targets, temperature, vocab_size, group, is_split, squares=False, softcap=softcap,
            is_exact=is_exact(model.config),
        ).logprobs  # fmt: skip

        def aligned(values: Tensor) -> Tensor:
            return align_to_tokens(gather_stream(values, packing), packing)

        best = ()
        if count:
            best = head_top_logprobs(hidden, weight, count, temperature, vocab_size, group, is_split, softcap)
        best = [torch.stack([aligned(column) for column in values.unbind(-1)], dim=-1) for values in best]
        empty = logprobs.new_zeros(len(tokens), 0)
        return (aligned(logprobs), *best) if best else (aligned(logprobs), empty.long(), empty)

    return run_chunk(chunk, tokens, lengths, processor, None, None)
