"""Log-probabilities and entropy over a vocabulary that is split over tensor-parallel ranks, chunk by chunk.

The head's logits exist for one chunk of tokens at a time and are recomputed in backward, so the full [T, V] logits
of a micro-batch are never alive. Two collectives a chunk: a maximum, and three sums packed together.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024


class _LogProbEntropy(torch.autograd.Function):
    """logits [C, V/tp] fp32, targets [C] -> (log p(target) [C], entropy [C]); never writes to the caller's logits."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, group):
        """`first` is the vocabulary index of this rank's first column."""
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top.unsqueeze(-1)
        weights = shifted.exp()
        local = targets - first
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        chosen = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        sums = torch.stack([weights.sum(-1), chosen, (weights * shifted).sum(-1)])
        dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(shifted - log_total.unsqueeze(-1), local, here, entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        """∂ log p_y/∂x = 1_y − p and ∂H/∂x = −p (log p + H), each rank for its own columns."""
        logp, local, here, entropy = ctx.saved_tensors
        p = logp.exp()
        grad = -grad_logprob.unsqueeze(-1) * p - grad_entropy.unsqueeze(-1) * p * (logp + entropy.unsqueeze(-1))
        grad.scatter_add_(-1, local.unsqueeze(-1), (grad_logprob * here).unsqueeze(-1))
        return grad, None, None, None


def vocab_parallel_logprob_entropy(logits: Tensor, targets: Tensor, group) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets and entropy of the whole distribution.

    Args:
        logits: [C, V/tp] float32, this rank's columns.
        targets: [C] int64 token ids of the whole vocabulary.
        group: the tensor-parallel group; rank r holds columns r·V/tp … (r+1)·V/tp − 1.

    Returns:
        log p(targets) [C] and entropy [C], equal on all ranks of the group, in nats.
    """
    return _LogProbEntropy.apply(logits, targets, dist.get_rank(group) * logits.shape[-1], group)


def mask_padding(logits: Tensor, vocab_size: int, first: int) -> Tensor:
    """Takes the columns behind the tokenizer's vocabulary out of the distribution (padding for divisibility)."""
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    return logits.masked_fill(columns >= vocab_size, -1e30)  # finite: 0 · (−1e30) in the entropy is 0, not NaN


def gathered_logprobs(logits: Tensor, parts: int) -> Tensor:
    """Log-probabilities of all tokens from gathered logits [C, V], summed as `parts` tensor-parallel ranks sum.

    The same operations in the same order as in `vocab_parallel_logprob_entropy`: a rollout that uses it logs the very
    numbers that training recomputes, not numbers that are close to them.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    total = shifted.exp().unflatten(-1, (parts, -1)).sum(-1).sum(-1)
    return shifted - total.log().unsqueeze(-1)


def head_logprob_entropy(hidden: Tensor, head, targets: Tensor, temperature: float, vocab_size: int, group):
    """Log-probabilities and entropies of a hidden state's next tokens, at most `CHUNK_TOKENS` at a time.

    Args:
        hidden: [T, H] hidden states.
        head: function hidden [C, H] -> logits [C, V/tp].
        targets: [T] int64 tokens whose log-probability is asked for.
        temperature: logits are divided by it, as in the rollout.
        vocab_size: the tokenizer's; padded columns do not take part.

    Returns:
        Two [T] float32 tensors, differentiable with respect to `hidden` and the head.
    """

    def chunk(hidden: Tensor, targets: Tensor):
        logits = head(hidden).float() / temperature
        first = dist.get_rank(group) * logits.shape[-1]
        return vocab_parallel_logprob_entropy(mask_padding(logits, vocab_size, first), targets, group)

    count = -(-len(targets) // CHUNK_TOKENS)  # even parts: a rest of few rows would round differently
    parts = zip(hidden.tensor_split(count), targets.tensor_split(count), strict=True)
    pieces = [checkpoint(chunk, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in parts]
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))
