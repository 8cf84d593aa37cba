"""Several end tokens: Megatron's engine compares each sampled token with a single one per request."""

import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor

NO_TOKEN = -1  # an id that is never sampled


class EndTokens:
    """The ids that end a response; may be none."""

    def __init__(self, ids: tuple[int, ...] = ()):
        self.ids = frozenset(ids)
        self._tensor = torch.tensor(sorted(ids), dtype=torch.int64)

    def contains(self, tokens: Tensor) -> Tensor:
        """Whether each of some tokens on the host is one of them."""
        return torch.isin(tokens, self._tensor)


class EndTokensController(TextGenerationController):
    """Megarl's controller: ends a request at any of `end_tokens`, and makes no text of tokens."""

    end_tokens = EndTokens()

    @staticmethod
    def detokenize(*_, **__) -> str:
        """Returns no text; Megatron's engine asks for that of each finished request."""
        return ""

    def _transfer_samples_to_cpu(self, active_request_count: int):
        """Same as Megatron's; then sets each request's own end token, which is compared next."""
        tokens, speculative = super()._transfer_samples_to_cpu(active_request_count)
        context = self.inference_wrapped_model.inference_context
        ends = torch.where(self.end_tokens.contains(tokens), tokens, NO_TOKEN)
        context.active_request_metadata["termination_id"][:active_request_count] = ends
        return tokens, speculative
