"""Multi-latent attention against Megatron's own module, and with recomputation."""

import argparse

import torch

from tests.helpers.models.tiny_models import VOCAB, build, ragged_tokens
from tests.helpers.worlds import run_world

TOKENS = 13


class Dense(torch.nn.Module):
    """A core attention over one sequence: [T, 1, A, D] and values of another width."""

    def __init__(self, config, softmax_scale, **_):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def of_megatron(args, groups):
    """Megatron's module, with megarl's norms."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.training.arguments import core_transformer_config_from_args

    from megarl.mcore.kernels.norm import build_norm

    config = core_transformer_config_from_args(argparse.Namespace(**vars(args) | {"rope_type": "rope"}))
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True, multi_latent_attention=True)
    parts = spec.submodules.self_attention.submodules
    parts.core_attention, parts.q_layernorm, parts.kv_layernorm = Dense, build_norm, build_norm
    return MLASelfAttention(config, parts, 1, AttnMaskType.causal, pg_collection=groups)


def both(rank):
    """(weights by name, output, gradient of the hidden states) of megarl's module and of Megatron's."""
    from megarl.mcore.attention.packing import pack_sequences

    model, args, place = build("", "latent")
    ours = model.decoder.layers[0].self_attention
    theirs = of_megatron(args, place.pg_collection)
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(TOKENS, 1, 64, generator=torch.Generator().manual_seed(1))
    upward = torch.randn(TOKENS, 1, 64, generator=torch.Generator().manual_seed(2))
    layout = pack_sequences(torch.tensor([TOKENS]))
    frequencies = model.rotary_pos_emb(TOKENS)[layout.positions, 0]
    found = []
    for module, more in ((ours, {"rotary_pos_emb": frequencies, "packed_seq_params": layout}), (theirs, {})):
        x = hidden.clone().requires_grad_()
        output, _ = module(x, None, **more)
        (output * upward).sum().backward()
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        found.append((shapes, output.detach(), x.grad, {n: p.grad.clone() for n, p in module.named_parameters()}))
    return found


def test_weights_and_results_are_those_of_megatrons_module():
    ((shapes, output, gradient, of_weights), (their_shapes, expected, their_gradient, of_theirs)) = run_world(both, 1)[
        0
    ]
    assert shapes == their_shapes and len(shapes) == 7
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (gradient - their_gradient).abs().max() <= 1e-5 * their_gradient.abs().max()
    for name, expected in of_theirs.items():
        assert (of_weights[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def gradients(rank, flags: str):
    from megarl.mcore.model.forward_pass import token_scores

    model, _, _ = build(flags, "latent")
    tokens, lengths = ragged_tokens([5, 9, 1, 17])
    scores = token_scores(model, tokens, lengths, 1.0, VOCAB)
    scores.logprobs.square().sum().backward()
    return scores.logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_recomputation_changes_no_bit():
    ((logprobs, expected),) = run_world(gradients, 1, "")
    ((again, found),) = run_world(gradients, 1, "--recompute-activations")
    assert torch.equal(logprobs, again) and all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert all(grad.any() for grad in expected.values())
