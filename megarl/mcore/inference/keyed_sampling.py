"""Token sampling of the rollout engine: keyed random numbers, and the log-probs that training recomputes."""

from collections import defaultdict

import torch
from megatron.core.inference.sampling.base import Sampling
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings, sample_tokens, sample_tokens_by_integers, uniforms
from megarl.mcore.inference.end_tokens import ForcedTokens
from megarl.mcore.inference.generation import GenerationRequest, TopLogprobs
from megarl.mcore.kernels import native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.head import softcap_
from megarl.mcore.kernels.head_scores import GatheredPolicy


class KeyedSampling(Sampling):
    """Samples the token at each position of a request with one number of the request's random stream."""

    def __init__(self, vocab_size: int, tensor_ranks: int, softcap: float | None = None, is_exact: bool = False):
        """`softcap`, `is_exact`: as in `head_scores`."""
        self.vocab_size, self.tensor_ranks = vocab_size, tensor_ranks
        self.softcap, self._is_exact = softcap, is_exact
        self._top_logprobs: dict[int, dict[int, TopLogprobs]] = {}  # request id -> position -> of the token there
        self._own: dict[int, SamplingSettings] = {}  # by request id
        self._top_counts: dict[int, int] = {}  # by request id, of requests that want top log-probs
        self._restricted: set[int] = set()  # ids of requests with top-k or top-p
        self.forced: ForcedTokens | None = None  # take the places of drawn ones
        self._policy: GatheredPolicy | None = None
        self._log_probs: Tensor | None = None  # of the tokens just sampled, if they are known already
        self.reset(SamplingSettings(), 0)

    def reset(self, settings: SamplingSettings, max_requests: int):
        """Begins without requests, whose ids will be below `max_requests`; `settings`: of those without own ones."""
        self.settings = settings
        # By request id: random keys, temperatures in fp32, and 1 for a greedy request, else 0.
        self.keys = torch.zeros(max_requests, dtype=torch.int64)
        self.temperatures, self.greedy = torch.ones(max_requests), torch.zeros(max_requests, dtype=torch.int32)
        # Their memory as arrays: a number is set in a tenth of the time that an operator takes.
        self._arrays = self.keys.numpy(), self.temperatures.numpy(), self.greedy.numpy()
        for by_id in (self._own, self._top_counts, self._top_logprobs, self._restricted):
            by_id.clear()

    def begin(self, request_id: int, request: GenerationRequest):
        settings = request.sampling or self.settings
        for array, value in zip(self._arrays, (request.key, settings.temperature, settings.greedy), strict=True):
            array[request_id] = value
        if settings.is_restricted:
            self._restricted.add(request_id)
        if request.sampling is not None and request.sampling != self.settings:
            self._own[request_id] = request.sampling
        if request.top_logprobs:
            self._top_counts[request_id], self._top_logprobs[request_id] = request.top_logprobs, {}

    def finish(self, request_id: int):
        for by_id in (self._own, self._top_counts, self._top_logprobs):
            by_id.pop(request_id, None)
        self._restricted.discard(request_id)

    def top_logprobs_of(self, request_id: int, start: int, count: int) -> list[TopLogprobs] | None:
        """Most likely tokens at `count` positions of a request from `start` on; None if it did not want them."""
        known = self._top_logprobs.get(request_id)
        return None if known is None else [known[position] for position in range(start, start + count)]

    def sample_kernel(self, logits, n, context, *, gather_indices=None, output=None, **_):
        """Samples tokens [n] of the active requests from logits [≥ n, V], as Megatron's sampling backends do."""
        rows = self._softcapped(logits[:n] if gather_indices is None else logits[gather_indices[:n]])
        request_ids, positions = context.sampled_rows()
        tokens = self._drawn(rows, request_ids.long(), positions.long())
        if self.forced:
            tokens, self._log_probs = self.forced.force(tokens, self.log_probs(tokens), request_ids, positions)
        if self._top_counts:
            self._keep_top_logprobs(rows, request_ids.tolist(), positions.tolist())
        return tokens if output is None else output.copy_(tokens)

    def guess(self, logits: Tensor, request_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the tokens [n] that requests would draw at some positions if these were the logits [n, V] there;
        `log_probs` stay those of the last sampled tokens."""
        rows, known = self._softcapped(logits), (self._policy, self._log_probs)
        tokens = self._drawn(rows, request_ids, positions)
        self._policy, self._log_probs = known
        return tokens

    @property
    def needs_host(self) -> bool:
        """Whether `sample_on_device` does not compute what some request wants."""
        return bool(self._restricted or self._top_counts)

    def sample_on_device(
        self, logits: Tensor, numbers: Tensor, temperatures: Tensor, greedy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probs [n] of logits [n, V] on their device, without waiting for it. `temperatures`,
        `greedy`: [n], as those of request ids."""
        from megarl.mcore.kernels.cuda.head_rows import sample_rows  # needs Triton

        return sample_rows(self._softcapped(logits), numbers, temperatures, greedy, self.vocab_size)

    @staticmethod
    def numbers_on_device(keys: Tensor, positions: Tensor) -> Tensor:
        """As `uniforms`, on their device, a CUDA device."""
        from megarl.mcore.kernels.cuda.head_rows import uniform_rows  # needs Triton

        return uniform_rows(keys.contiguous(), positions)

    def _softcapped(self, logits: Tensor) -> Tensor:
        if self.softcap is None:
            return logits
        return softcap_(logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True), self.softcap)

    def _has_row_kernels(self, logits: Tensor) -> bool:
        """Whether log-probs are those of `sample_on_device`, so that a token has the same ones in every step."""
        return self._is_exact or logits.is_cuda

    def _sample(self, logits: Tensor, numbers: Tensor, settings: SamplingSettings) -> Tensor:
        """Returns tokens [n] of logits [n, V], with the softcap applied, under the same settings."""
        if self._has_row_kernels(logits) and not settings.is_restricted:
            temperatures = logits.new_full((len(logits),), settings.temperature, dtype=torch.float32)
            greedy = logits.new_full((len(logits),), settings.greedy, dtype=torch.int32)
            tokens, self._log_probs = self.sample_on_device(logits, numbers.to(logits.device), temperatures, greedy)
            return tokens
        if native.supports(logits) and not settings.is_restricted:
            # One pass, whose log-probs are those of training, which uses the same kernel for the sums of the softmax.
            numbers = numbers[:0] if settings.greedy else numbers
            tokens, chosen, totals = native.ops.sample(
                logits.contiguous(), settings.temperature, self.vocab_size, self.tensor_ranks, numbers
            )
            self._log_probs = chosen - totals.sum(-1).log()
            return tokens
        self._policy = GatheredPolicy(logits, settings.temperature, self.vocab_size, self.tensor_ranks)
        self._log_probs = None
        sample = sample_tokens_by_integers if logits.device.type == "cuda" else sample_tokens
        columns, numbers = logits[:, : self.vocab_size], numbers.to(logits.device)
        tokens = sample(columns, self._policy.weights, numbers, settings)
        if self._has_row_kernels(logits):
            from megarl.mcore.kernels.cuda.head_rows import row_logprobs  # needs Triton

            self._log_probs = row_logprobs(logits, tokens, settings.temperature, self.vocab_size)
        return tokens

    def _drawn(self, logits: Tensor, request_ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens [n] of requests at their positions, under their own settings; no row depends on other rows."""
        numbers = uniforms(self.keys[request_ids], positions)
        if not self._own:
            return self._sample(logits, numbers, self.settings)
        tokens = logits.new_empty(len(logits), dtype=torch.int64)
        log_probs = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
        groups = defaultdict(list)
        for row, request_id in enumerate(request_ids.tolist()):
            groups[self._own.get(request_id, self.settings)].append(row)
        for settings, members in groups.items():
            rows = _enough_rows(members)
            place = rows.to(logits.device)
            chosen = self._sample(logits[place], numbers[rows], settings)
            tokens[place], log_probs[place] = chosen, self.log_probs(chosen)
        self._log_probs = log_probs
        return tokens

    def _keep_top_logprobs(self, logits: Tensor, request_ids: list[int], positions: list[int]):
        by_temperature = defaultdict(list)
        for row, request_id in enumerate(request_ids):
            if request_id in self._top_counts:
                by_temperature[self._own.get(request_id, self.settings).temperature].append(row)
        for temperature, members in by_temperature.items():
            rows = logits[_enough_rows(members).to(logits.device)]
            policy = GatheredPolicy(rows, temperature, self.vocab_size, self.tensor_ranks)
            found = policy.top_logprobs(max(self._top_counts[request_ids[row]] for row in members))
            for row, tokens, logprobs in zip(members, *(x.tolist() for x in found), strict=False):
                request_id = request_ids[row]
                pairs = list(zip(tokens, logprobs, strict=True))[: self._top_counts[request_id]]
                self._top_logprobs[request_id][positions[row]] = pairs

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probs [n] of the tokens [n] just sampled, of the scaled policy over all tokens, as training has them."""
        return self._policy.logprobs(tokens) if self._log_probs is None else self._log_probs

    def log_probs_kernel(self, logits, context, *, token_to_request_index=None):
        """Not supported: `PagedContext` needs only the log-probs of sampled tokens."""
        raise NotImplementedError("log-probs of the whole vocabulary")


def _enough_rows(rows: list[int]) -> Tensor:
    """[n] rows, the first one repeated, with the same results, until there are `MIN_ROWS`."""
    return torch.tensor(rows + rows[:1] * (MIN_ROWS - len(rows)))
