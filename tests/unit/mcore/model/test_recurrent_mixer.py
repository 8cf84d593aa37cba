"""Layers with a recurrent state, packed: each sequence alone, and its state does not reach its neighbours; gradients
of those with a decay of each channel, and of the multi-latent attention beside them."""

from pathlib import Path

import pytest
import torch

from megarl.mcore.kernels import native
from tests.helpers.folders import hf_folders
from tests.helpers.folders.trained_folders import gradients, of_transformers, trained
from tests.helpers.models.attention_inputs import needs_kernels
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


# Megarl's parameters -> those of transformers whose rows they have, in a layer's attention or what it has instead.
LATENT = {"linear_q_proj": ["q_proj"], "linear_q_down_proj": ["q_a_proj"], "linear_q_up_proj": ["q_b_proj"],
          "linear_kv_down_proj": ["kv_a_proj_with_mqa"], "linear_kv_up_proj": ["kv_b_proj"], "linear_proj": ["o_proj"],
          "q_layernorm": ["q_a_layernorm"], "kv_layernorm": ["kv_a_layernorm"], "linear_gate": ["g_proj"]}  # fmt: skip
DELTA = {"conv1d": ["conv1d"], "out_norm": ["o_norm"], "out_proj": ["o_proj"], "z_proj": ["g_b_proj"],
         "alpha_proj": ["forget_gate.f_b_proj"], "latent_proj": ["g_a_proj", "forget_gate.f_a_proj"],
         "dt_bias": ["forget_gate.dt_bias"], "A_log": ["forget_gate.A_log"]}  # fmt: skip
FIRST = {"kimi_linear": ["q_proj", "k_proj", "v_proj", "b_proj"],
         "ling_3": ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "forget_gate.f_proj"]}  # fmt: skip


def gradient_errors(rank: int, case: str, folder: Path) -> dict[str, float]:
    """Largest differences of gradients from transformers', as shares of the largest number, by parameter."""
    model, vocabulary, *_ = trained(folder, longest=40)
    rows = [row[:90] for row in hf_folders.reference(case).tokens]
    _, grads, factors = gradients(model, vocabulary, rows)
    theirs, found = of_transformers(folder, rows, factors), {}
    names = LATENT | DELTA | {"in_proj": FIRST[case]}
    for name, grad in grads.items():
        prefix, _, own = name.partition(".self_attention.")
        if not own:
            continue
        stems = names[own.removesuffix(".weight")]
        end = ".weight" if own.endswith(".weight") else ""
        of = [theirs[f"model.{prefix.removeprefix('decoder.')}.self_attn.{stem}{end}"] for stem in stems]
        other = torch.cat(of).reshape(grad.shape)
        found[name] = float((grad - other).abs().max() / other.abs().max())
    return found


@needs_kernels
@pytest.mark.parametrize("case, count", [("kimi_linear", 3 * 9 + 5), ("ling_3", 3 * 6 + 8)])
def test_gradients_of_channels_decays_are_transformers(case, count, tmp_path):
    (found,) = run_world(gradient_errors, 1, case, hf_folders.write_folder(case, tmp_path / case))
    assert len(found) == count and max(found.values()) <= 1e-4, found
