"""What Transformer Engine's layers compute, in plain torch, to walk its spec where its kernels cannot run."""

import contextlib
from unittest import mock

import torch
import transformer_engine.pytorch as te
from torch.nn import functional


def _normed(x, kind: str, weight, bias, eps: float, is_zero_centred: bool):
    weight = 1 + weight if is_zero_centred else weight
    if kind == "RMSNorm":
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _linear(self, x, **_):
    bias = self.bias if self.use_bias else None
    if self.return_bias:
        return functional.linear(x, self.weight), bias
    return functional.linear(x, self.weight, bias)


def _norm_and_linear(self, x, **_):
    bias = getattr(self, "layer_norm_bias", None)
    return _linear(
        self, _normed(x, self.normalization, self.layer_norm_weight, bias, self.eps, self.zero_centered_gamma)
    )


def _grouped(self, x, counts, **_):
    parts = x.split(list(map(int, counts)))
    return torch.cat([functional.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


def _rms_norm(self, x):
    return _normed(x, "RMSNorm", self.weight, None, self.eps, self.zero_centered_gamma)


def _layer_norm(self, x):
    return _normed(x, "LayerNorm", self.weight, self.bias, self.eps, self.zero_centered_gamma)


@contextlib.contextmanager
def plain_products():
    """Layers on one tensor-parallel rank compute in plain torch inside, and the engine calls them as on a device."""
    from megarl.mcore.model import decoder_layer

    forwards = {te.Linear: _linear, te.LayerNormLinear: _norm_and_linear, te.GroupedLinear: _grouped,
                te.RMSNorm: _rms_norm, te.LayerNorm: _layer_norm}  # fmt: skip
    with contextlib.ExitStack() as stack:
        for kind, forward in forwards.items():
            stack.enter_context(mock.patch.object(kind, "forward", forward))
        stack.enter_context(mock.patch.object(decoder_layer, "apply_linear", lambda layer, x: layer(x)))
        yield
