"""Layers with a recurrent state, packed: each sequence alone, and its state does not reach its neighbours."""

import pytest
import torch

from megarl.mcore.kernels import native
from tests.helpers.models.tiny_models import VOCAB, build, ragged_tokens
from tests.helpers.worlds import run_world


def packed_and_alone(rank: int, shape: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of sequences in one micro-batch, of each alone, and with other tokens in the first one."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, *_ = build("", shape)
    tokens, lengths = ragged_tokens([5, 1, 70, 9])
    with inference_mode(model):
        packed = token_scores(model, tokens, lengths, 1.0, VOCAB).logprobs
        parts = tokens.split(lengths.tolist())
        alone = [token_scores(model, part, torch.tensor([len(part)]), 1.0, VOCAB).logprobs for part in parts]
        changed = torch.cat([(tokens[:5] + 1) % VOCAB, tokens[5:]])
        other = token_scores(model, changed, lengths, 1.0, VOCAB).logprobs
    return packed, torch.cat(alone), other


@pytest.mark.parametrize("shape", ["recurrent", "kimi", "ling", "mamba"])
def test_packed_sequences_are_those_alone(shape):
    ((packed, alone, other),) = run_world(packed_and_alone, 1, shape)
    torch.testing.assert_close(packed, alone, rtol=0, atol=0 if native.is_built() else 1e-5)
    assert torch.equal(other[5:], packed[5:]) and not torch.equal(other[:5], packed[:5])
