"""Layers that norm what attention and MLP add to the hidden states.

OLMo 2 (2501.00656 §3.2) has only these norms, Gemma 2 (2408.00118 §2) norms before attention and MLP as well.
"""

import contextlib

from torch import Tensor

from megarl.mcore.kernels.norm import Norm
from megarl.mcore.model.decoder_layer import DecoderLayer, MoEDecoderLayer, StepPlan


class PostNormLayer(DecoderLayer):
    """A layer with a norm after attention and one after the MLP or experts; the spec says which it has before them."""

    has_plain_sums = False

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda, self.mlp_bda = self._attention_bda, self._mlp_bda
        # Megatron enables gradients here even in passes without, which would keep all hidden states.
        self.bias_dropout_add_exec_handler = contextlib.nullcontext

    def step(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """Same as that of `DecoderLayer`, with the norms."""
        attended = self.self_attention.step(self.input_layernorm(hidden), plan)
        hidden = self._add_normed(self.post_self_attn_layernorm, attended, hidden)
        return self._add_normed(self.post_mlp_layernorm, self._feed_forward(hidden, plan), hidden)

    def _add_normed(self, norm: Norm, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, *_) -> Tensor:
        """Returns residual + norm(output + bias), in rollout and training."""
        output, bias = output_with_bias
        return residual + norm(output if bias is None else output + bias)

    def _attention_bda(self, *_):
        """Megatron's interface: called with two switches, returns what adds a layer's output to the residual."""
        return lambda *args: self._add_normed(self.post_self_attn_layernorm, *args)

    def _mlp_bda(self, *_):
        return lambda *args: self._add_normed(self.post_mlp_layernorm, *args)


class PostNormMoELayer(MoEDecoderLayer, PostNormLayer):
    """The same with experts."""
