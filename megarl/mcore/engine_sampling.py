"""How the rollout engine draws tokens: from keyed random numbers, with the log-probs that training recomputes."""

import torch
from megatron.core.inference.sampling.base import Sampling

from megarl.mcore.tensor_parallel import gathered_logprobs, mask_padding
from megarl.rollout.random import uniforms
from megarl.rollout.sampling import SamplingSettings, draw


class KeyedSampling(Sampling):
    """Draws the token at a position of a request from one number of the request's stream."""

    def __init__(self, vocab_size: int, tensor_ranks: int):
        self.vocab_size, self.tensor_ranks = vocab_size, tensor_ranks
        self.settings = SamplingSettings()
        self.keys = torch.zeros(0, dtype=torch.int64)  # by request id

    def sample_kernel(self, logits, n, context, *, gather_indices=None, output=None, **_):
        """Tokens of the n active requests, from logits [≥ n, V]; the contract of Megatron's sampling backends."""
        rows = logits[:n] if gather_indices is None else logits[gather_indices[:n]]
        active = slice(context.paused_request_count, context.total_request_count)
        ids = context.request_ids[active].long().cpu()
        positions = (context.request_kv_length_offsets[active] + context.request_query_lengths[active]).long().cpu()
        numbers = uniforms(self.keys[ids], positions).to(rows.device)
        tokens = draw(mask_padding(rows.float(), self.vocab_size, 0), numbers, self.settings)
        return tokens if output is None else output.copy_(tokens)

    def log_probs_kernel(self, logits, context, *, token_to_request_index=None):
        """[rows, V] log-probs of the temperature-scaled policy, the same that training recomputes."""
        scaled = mask_padding(logits.float() / self.settings.temperature, self.vocab_size, 0)
        return gathered_logprobs(scaled, self.tensor_ranks)
