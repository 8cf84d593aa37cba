"""Token sampling of the rollout engine: keyed random numbers, and the log-probs that training recomputes."""

import torch
from megatron.core.inference.sampling.base import Sampling
from torch import Tensor

from megarl.algorithms.counter_rng import uniforms
from megarl.algorithms.token_sampling import SamplingSettings, sample_tokens
from megarl.mcore.kernels import native
from megarl.mcore.kernels.vocab_parallel_logprobs import GatheredPolicy, softcap_


class KeyedSampling(Sampling):
    """Samples the token at each position of a request with one number of the request's random stream."""

    def __init__(self, vocab_size: int, tensor_ranks: int, softcap: float | None = None):
        """`softcap`: as in `head_scores`."""
        self.vocab_size, self.tensor_ranks, self.softcap = vocab_size, tensor_ranks, softcap
        self.settings = SamplingSettings()
        self.keys = torch.zeros(0, dtype=torch.int64)  # by request id
        self._policy: GatheredPolicy | None = None
        self._log_probs: Tensor | None = None  # of the tokens just sampled, if the compiled kernel sampled them

    def sample_kernel(self, logits, n, context, *, gather_indices=None, output=None, **_):
        """Samples tokens [n] of the active requests from logits [≥ n, V], as Megatron's sampling backends do."""
        rows = logits[:n] if gather_indices is None else logits[gather_indices[:n]]
        if self.softcap is not None:
            rows = softcap_(rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True), self.softcap)
        request_ids, positions = context.sampled_rows()
        numbers = uniforms(self.keys[request_ids.long()], positions.long())
        if native.computes(rows) and not self.settings.is_restricted:
            tokens = self._sample(rows.contiguous(), numbers)
        else:
            self._policy = GatheredPolicy(rows, self.settings.temperature, self.vocab_size, self.tensor_ranks)
            self._log_probs, tokens = None, self._tokens(rows[:, : self.vocab_size], numbers)
        return tokens if output is None else output.copy_(tokens)

    def _sample(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Returns tokens [n] of logits [n, V], sampled by the compiled kernel in one pass; keeps their log-probs.

        These equal those of training, which uses the same kernel for the sums of the softmax.
        """
        s = self.settings
        numbers = numbers[:0] if s.greedy else numbers
        tokens, chosen, totals = native.ops.sample(logits, s.temperature, self.vocab_size, self.tensor_ranks, numbers)
        self._log_probs = chosen - totals.sum(-1).log()
        return tokens

    def _tokens(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Returns tokens [n] of logits [n, V], on their device; `numbers` [n] are the host's.

        A deterministic run samples on the host: torch has no deterministic cumulative sum of floating-point numbers
        for CUDA and refuses the other one.
        """
        is_refused = logits.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
        place = torch.device("cpu") if is_refused and not self.settings.greedy else logits.device
        weights = self._policy.weights.to(place)
        return sample_tokens(logits, weights, numbers.to(place), self.settings).to(logits.device)

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Returns [n] log-probs of the tokens [n] just sampled, under the temperature-scaled policy over the whole
        vocabulary, as training recomputes them."""
        return self._policy.logprobs(tokens) if self._log_probs is None else self._log_probs

    def log_probs_kernel(self, logits, context, *, token_to_request_index=None):
        """Not supported: `PagedContext` needs only the log-probs of sampled tokens."""
        raise NotImplementedError("log-probs of the whole vocabulary")
