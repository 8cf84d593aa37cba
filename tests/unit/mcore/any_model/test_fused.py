"""Parts of transformers' modules that the compiled kernels compute, beside what the modules compute themselves."""

import pytest
import torch
from torch import nn

from megarl.mcore.any_model import attention, fused, source
from megarl.mcore.any_model.source import Source
from megarl.mcore.kernels import native
from tests.helpers.folders import any_types
from tests.helpers.tiers import by_default

pytestmark = pytest.mark.skipif(not native.is_used(), reason="no compiled kernels")

# Parts of each of six layers that are recognised: every layer whole; norms alone; MLPs and the layer without rotation.
PARTS = {
    "qwen3": {"ModuleNorm": 25, "Attention": 6, "GatedMLP": 6, "Layer": 6},
    "granite": {"ModuleNorm": 13, "Attention": 6, "GatedMLP": 6, "Layer": 6},
    "qwen2": {"ModuleNorm": 13, "Attention": 6, "GatedMLP": 6, "Layer": 6},
    "gemma2": {"ModuleNorm": 25},
    "cohere2": {"Attention": 1, "GatedMLP": 6},
    "phi": {"Attention": 6},
}


def found_of(kind: str) -> Source:
    """A small model type."""
    return source.of_config(any_types.small_config(kind, **{"qk_layernorm": False} if kind == "phi" else {}))


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The parts that the kernels compute."""
    return [part for part in module.modules() if "fused" in vars(part)]


def counts_of(module: nn.Module) -> dict[str, int]:
    """Their number by kind."""
    kinds = [type(vars(part)["fused"]).__name__ for part in parts_of(module)]
    return {kind: kinds.count(kind) for kind in kinds}


def outcome(part: nn.Module, function, hidden: torch.Tensor, others: dict) -> torch.Tensor:
    """The first output of a part, in a pass that hands values through."""
    with torch.no_grad(), attention.running(attention.FirstPass()):
        out = function(hidden, **others)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("kind", by_default(tuple(PARTS), ("qwen3", "granite", "cohere2")))
def test_parts_compute_what_their_classes_compute(kind):
    found = found_of(kind)
    module, own = found.module(torch.float32), found.module(torch.float32)
    names = list(module.state_dict())
    fused.fuse(module)
    assert counts_of(module) == PARTS[kind]
    assert list(module.state_dict()) == names
    source.find_slots(own)
    turned = own.base_model.rotary_emb(torch.zeros(1), torch.arange(20, 24)[None])
    others = {"position_embeddings": turned, "attention_mask": None}
    with source.values_in(module, source.spread_values), source.values_in(own, source.spread_values):
        for name, part in module.named_modules():
            if "fused" not in vars(part):
                continue
            is_vector = isinstance(vars(part)["fused"], (fused.ModuleNorm, fused.GatedMLP))
            width = part.weight.numel() if hasattr(part, "weight") else found.text.hidden_size
            hidden, alone = torch.randn(1, 4, width), own.get_submodule(name)
            given = {} if is_vector else others
            one, other = (outcome(each, each.forward, hidden, given) for each in (part, alone))
            assert torch.allclose(one, other, rtol=0, atol=5e-6 * float(other.abs().max())), name


def joined(kind: str, changed: int | None = None, **entries) -> list[int]:
    """How many layers the operator of each layer computes. `changed`: a layer that reads other numbers than the one
    before it returns."""
    module = source.of_config(any_types.small_config(kind, **entries)).module(torch.float32)
    layers = module.base_model.layers
    if changed is not None:
        layers[changed].register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    fused.fuse(module)
    return [1 + len(vars(layer)["fused"].following) for layer in layers]


def test_one_operator_computes_layers_that_read_each_other():
    assert joined("granite") == [6, 1, 1, 1, 1, 1]
    assert joined("granite", changed=4) == [4, 1, 1, 1, 2, 1]
    assert joined("qwen2", max_window_layers=4) == [4, 1, 1, 1, 2, 1]  # the last two have a window


def planted(kind: str, attribute: str, change) -> dict[str, int]:
    """Parts that are recognised after `change` of the forward pass of each part whose class name ends so."""
    found = found_of(kind)
    module = found.module(torch.float32)
    for part in module.modules():
        if type(part).__name__.endswith(attribute):
            # A class of its own, as of a type that transformers publishes later.
            part.__class__ = type(f"Other{attribute}", (type(part),), {"forward": change(type(part).forward)})
    fused.fuse(module)
    return counts_of(module)


def outputs_times(factor: float):
    """A change of a forward pass: its output is another one."""

    def change(forward):
        def other(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

        return other

    return change


def clipped(forward):
    """A change that shows only where an input is large."""
    return lambda self, x: forward(self, x.clamp(-20, 20))


def with_scaled_late_queries(forward):
    """A change that shows only at late positions, of what a module does with its tokens before attention."""

    def other(self, hidden_states, position_ids=None, **kwargs):
        late = (position_ids >= 32).unsqueeze(-1)
        return forward(self, hidden_states=hidden_states * (1 + late), position_ids=position_ids, **kwargs)

    return other


@pytest.mark.parametrize(
    ("attribute", "change", "left"),
    [
        ("RMSNorm", outputs_times(1.00001), {"GatedMLP": 6}),
        ("MLP", outputs_times(1.00001), {"ModuleNorm": 13, "Attention": 6}),
        ("MLP", clipped, {"ModuleNorm": 13, "Attention": 6}),
        ("Attention", outputs_times(1.00001), {"ModuleNorm": 13, "GatedMLP": 6}),
        ("Attention", with_scaled_late_queries, {"ModuleNorm": 13, "GatedMLP": 6}),
        ("DecoderLayer", outputs_times(1.0 + 2**-22), {"ModuleNorm": 13, "Attention": 6, "GatedMLP": 6}),
    ],
)
def test_a_variant_that_differs_is_left_alone(attribute, change, left):
    expected = left | ({"Attention": 6} if attribute == "RMSNorm" else {})
    assert planted("granite", attribute, change) == expected


def test_a_buffer_is_left_alone():
    found = found_of("granite")
    module = found.module(torch.float32)
    for layer in module.base_model.layers:
        layer.register_buffer("scale", torch.ones(1))  # loaded from a folder later
    fused.fuse(module)
    assert counts_of(module) == {"ModuleNorm": 13, "Attention": 6, "GatedMLP": 6}


def test_what_is_wrapped_around_a_linear_layer_is_called():
    found = found_of("granite")
    module = found.module(torch.float32)
    fused.fuse(module)
    mlp, calls = module.base_model.layers[0].mlp, []
    with source.values_in(module, source.spread_values), torch.no_grad():
        hidden = torch.randn(1, 500, found.text.hidden_size)
        before = mlp(hidden)
        mlp.up_proj.forward = lambda x, own=mlp.up_proj.forward: calls.append(1) or 2 * own(x)
        assert torch.allclose(mlp(hidden), 2 * before, atol=1e-5) and calls
    single, _ = fused.products(module)
    assert any(weight is mlp.up_proj.weight for weight in single)
    assert not any(weight is module.base_model.layers[1].mlp.up_proj.weight for weight in single)
