"""The core attention of the layer spec: packed sequences, by the attention backend that the flags choose.

megatron-core's own core attention does not support packed sequences and builds the full score matrix.
"""

import torch
from megatron.core.transformer.module import MegatronModule

from megarl.mcore.attention import backends
from megarl.mcore.attention.windows import kind_of_layer
from megarl.mcore.parallel.context_parallel import gather_for_attention


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed sequences [T, H, D], with any context parallelism."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.backend = backends.load(config)
        self.kind = kind_of_layer(config, layer_number)  # of plans for layers with or without a window
        self.tp_group = pg_collection.tp  # else checkpointing reads the group from Megatron's global state

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        """query [T, H, D], key, value [T, G, D] of this rank -> [T, H·D]; `packed_seq_params` is a `PackedLayout`."""
        layout = packed_seq_params
        if layout.order is not None:
            key_value = gather_for_attention(torch.cat([key, value], dim=1), layout.order, layout.cp_group)
            key, value = key_value.chunk(2, dim=1)
        segments = layout.segments[self.kind]
        return self.backend.packed_attention(query, key, value, segments, self.softmax_scale).flatten(1)
