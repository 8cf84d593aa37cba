"""Log-probabilities of the rollout, from logits of the whole vocabulary."""

import torch
from torch import Tensor

from megarl.mcore.kernels import native
from megarl.mcore.kernels.vocab_parallel_logprobs import PADDED_LOGIT, at_least_fp32


class GatheredPolicy:
    """Computes log-probabilities from gathered logits [n, V], summed as over `tensor_ranks` tensor-parallel ranks.

    On a CPU it runs the same operations in the same order as `head_scores`, so that rollout log-probs equal those that
    training recomputes to the last bit. It does not modify its inputs.
    """

    def __init__(self, logits: Tensor, temperature: float, vocab_size: int, tensor_ranks: int):
        """`vocab_size`: the tokenizer's; columns from it on are padding."""
        scaled, self.vocab_size = logits.to(at_least_fp32(logits)), vocab_size
        self.scaled = scaled if temperature == 1.0 else scaled / temperature
        self.top = self.scaled[:, :vocab_size].amax(-1, keepdim=True)
        # [n, V]: e^(logit − largest logit), 0 in padded columns
        if native.supports(self.scaled):
            self.weights = self.scaled.clone(memory_format=torch.contiguous_format)
            self.weights[:, vocab_size:] = PADDED_LOGIT
            shares = self.weights.view(len(logits) * tensor_ranks, -1)
            tops = self.top.expand(-1, tensor_ranks).flatten().contiguous()  # one row is flattened to a view
            totals = native.ops.softmax_sums(shares, tops, shares, 1)[0].view(-1, tensor_ranks)
        else:
            self.weights = (self.scaled - self.top).exp_()
            self.weights[:, vocab_size:] = 0.0
            totals = self.weights.unflatten(-1, (tensor_ranks, -1)).sum(-1)
        self.log_total = totals.sum(-1).log()

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Returns [n] log-probabilities of one token per row [n]."""
        chosen = self.scaled.gather(-1, tokens.unsqueeze(-1)) - self.top
        return chosen.squeeze(-1) - self.log_total

    def top_logprobs(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the `count` most likely tokens of each row and their log-probabilities, both [n, ≤ count]."""
        vocab_size = min(self.scaled.shape[-1], self.vocab_size)
        logits, tokens = self.scaled[:, :vocab_size].topk(min(count, vocab_size), dim=-1)
        return tokens, logits - self.top - self.log_total.unsqueeze(-1)
