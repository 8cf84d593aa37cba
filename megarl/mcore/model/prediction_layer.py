"""The layer of multi-token prediction (2404.19737; in the form of DeepSeek-V3, 2412.19437 §2.2).

From a model's hidden state of token t and the embedding of token t + 1 it predicts token t + 2. It shares the model's
embedding and head. It is a module apart from the model's chunks: the model computes and trains without it.
Shapes: T tokens of this rank, H hidden size.
"""

import copy
from typing import cast

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.config.megatron_flags import transformer_config
from megarl.mcore.kernels.linear import ReplicatedLinear
from megarl.mcore.kernels.norm import build_norm
from megarl.mcore.model.decoder_layer import DecoderLayer
from megarl.mcore.model.initialization import initialize
from megarl.mcore.model.layer_specs.local import layer_spec
from megarl.mcore.model.pipeline_layout import prediction_kind
from megarl.mcore.model.weight_table import PREDICTED


class _Parts(torch.nn.Module):
    """The layer's modules, under Megatron's names."""

    def __init__(self, args, config, pg_collection):
        super().__init__()
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm, self.final_layernorm = (build_norm(**sizes) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, config, pg_collection.tp)
        own = {"config": config, "layer_number": config.num_layers + 1, "pg_collection": pg_collection}
        layer = build_module(layer_spec(args, prediction_kind(args)), **own, add_layer_offset=False)
        self.mtp_model_layer = cast(DecoderLayer, layer)


class PredictionLayer(MegatronModule):
    """The layer on this rank; its experts choose by their scores alone, without losses for balance."""

    def __init__(self, args, pg_collection):
        """Builds it on the device; its weights depend only on `--seed`. `args`: the role's Megatron namespace."""
        config = copy.copy(transformer_config(args))
        config.perform_initialization = False
        config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, config.moe_z_loss_coeff = "none", 0.0, None
        super().__init__(config)
        self.pg_collection = pg_collection
        self.mtp = torch.nn.Module()
        self.mtp.layers = torch.nn.ModuleList([_Parts(args, config, pg_collection)])
        self.to(device=device.device())
        if args.draws_weights:
            initialize(self, args.seed, pg_collection)
        self.eval()

    def train(self, mode: bool = True) -> "PredictionLayer":
        """Stays in eval mode, whatever holds it: its routers have no part in balancing."""
        return super().train(False)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """The state of checkpoints and transfers, under Megatron's names."""
        state: dict = {}
        for name, module in self.layer.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{PREDICTED}{name}.", sharded_offsets, metadata, tp_group=self.pg_collection.tp
            )
        return state

    @property
    def layer(self) -> _Parts:
        return self.mtp.layers[0]  # type: ignore[index, return-value]

    def combined(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[T, 1, H] hidden states, and embeddings of the next tokens -> the input of `layer.mtp_model_layer`."""
        return self.layer.eh_proj(torch.cat([self.layer.enorm(embedded), self.layer.hnorm(hidden)], dim=-1))

    def forward(self, hidden: Tensor, embedded: Tensor, frequencies: Tensor | None, packing) -> Tensor:
        """The hidden states [T, 1, H] for the head, of a packed micro-batch.

        Args:
            hidden: [T, 1, H] of the model, after its final norm.
            embedded: [T, 1, H] of each token's next one.
            frequencies: rotary ones of the tokens, as a model's layers take them.
            packing: the micro-batch's `PackedLayout`.
        """
        inputs = {"attention_mask": None, "rotary_pos_emb": frequencies, "packed_seq_params": packing}
        predicted, _ = self.layer.mtp_model_layer(hidden_states=self.combined(hidden, embedded), **inputs)
        return self.layer.final_layernorm(predicted)


def layer_of(chunks) -> PredictionLayer:
    """The layer among what a rollout's model consists of."""
    (layer,) = (chunk for chunk in chunks if isinstance(chunk, PredictionLayer))
    return layer
