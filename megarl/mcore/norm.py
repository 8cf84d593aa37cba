"""Norms for the layer spec that work with and without sequence parallelism, on CPU and CUDA.

megatron-core's wrapper of torch's norms refuses sequence parallelism. What sequence parallelism needs of a norm is
small: its weights see only a slice of the tokens, so their gradients are summed over the tensor-parallel ranks,
which `finalize_model_grads` does for every parameter that carries `sequence_parallel = True`.
"""

import torch


class Norm:
    """Builds torch's RMSNorm or LayerNorm, as `config.normalization` says, with weights marked for the reduction."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_):
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
