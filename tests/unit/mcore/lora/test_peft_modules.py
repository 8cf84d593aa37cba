"""Factors of separate projections in a module that fuses them, and back."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megarl.mcore.lora.peft_files import read_adapter
from megarl.mcore.lora.peft_modules import Member, PeftModule, fuse, unfuse
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import role_of

EXPERTS = 3
OUTPUTS = {  # rows of the module's output that are those of its two projections
    "one after the other": (slice(0, 4), slice(4, 6)),
    "in turns": (slice(0, 6, 2), slice(1, 6, 2)),
    "anywhere": (torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])),
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def module_of(outputs, experts: int | None) -> PeftModule:
    """A module of two projections, whose rows of the output are said."""
    members = [
        Member(key, rows, len(range(6)[rows]) if isinstance(rows, slice) else len(rows), ())
        for key, rows in zip("ab", outputs, strict=True)
    ]
    return PeftModule("module", tuple(members), columns=5, experts=experts)


@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
def test_factors_fit_into_a_fused_module_and_come_back(outputs, experts):
    """The module's A has all ranks, and its B a block for each: the product of each projection is its own."""
    module, stacked = module_of(outputs, experts), () if experts is None else (experts,)
    factors = {}
    for member in module.members:
        factors[f"{member.key}.lora_A"] = drawn(*stacked, 2, 5)
        factors[f"{member.key}.lora_B"] = drawn(*stacked, member.rows, 2)
    a, b = fuse(module, factors, 2)
    assert a.shape == (*stacked, 4, 5) and b.shape == (*stacked, 6, 4)
    for member in module.members:
        own = factors[f"{member.key}.lora_B"] @ factors[f"{member.key}.lora_A"]
        assert torch.equal((b @ a)[..., member.outputs, :], own)
    back = unfuse(module, a, b)
    assert back.keys() == factors.keys() and all(torch.equal(back[key], factors[key]) for key in factors)


def test_a_module_whose_projections_share_their_ranks_gives_each_the_whole_a():
    module = module_of((slice(0, 4), slice(4, 6)), None)
    a, b = drawn(4, 5), drawn(6, 4)
    found = unfuse(module, a, b)
    assert all(torch.equal(found[f"{key}.lora_A"], a) for key in "ab")
    assert torch.equal(torch.cat([found[f"{key}.lora_B"] for key in "ab"]), b)


def test_projections_without_factors_get_none():
    module = module_of((slice(0, 4), slice(4, 6)), None)
    assert fuse(module, {}, 2) is None
    a, b = fuse(module, {"b.lora_A": drawn(2, 5), "b.lora_B": drawn(2, 2)}, 2)
    assert not b[:4].any() and unfuse(module, a, b).keys() == {"b.lora_A", "b.lora_B"}


def test_names_of_a_folder_with_fused_projections_are_read(tmp_path):
    """The own code of Sarvam 30B has one module for queries, keys and values; transformers has three."""
    generator = torch.Generator().manual_seed(5)
    role = role_of(hf_folders.write_folder("sarvam_moe", tmp_path / "model"), "", 1, False)
    shapes = hf_folders.reference("sarvam_moe").tensors
    rows, columns = next(each.shape for each in shapes if each.name.endswith("0.attention.query_key_value.weight"))
    config = hf_folders.reference("sarvam_moe").config
    sizes = [config[f"num_{heads}_heads"] * config["head_dim"] for heads in ("attention", *["key_value"] * 2)]
    assert sum(sizes) == rows
    a, b = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
    plain = {f"self_attn.{x}_proj": part for x, part in zip("qkv", b.split(sizes), strict=True)}
    found, layer = [], "base_model.model.model.layers.0."
    for modules in (plain, {"attention.query_key_value": b}):
        tensors = {f"{layer}{name}.lora_A.weight": a.clone() for name in modules}
        tensors |= {f"{layer}{name}.lora_B.weight": part.clone() for name, part in modules.items()}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        found.append(read_adapter(str(tmp_path), role.megatron, role.hf_model.family).factors)
    assert len(found[0]) == 6 and found[0].keys() == found[1].keys()
    assert all(torch.equal(factor, found[1][key]) for key, factor in found[0].items())
