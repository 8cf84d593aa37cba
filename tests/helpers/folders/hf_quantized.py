"""Quantized Hugging Face folders: fp8 in blocks as DeepSeek and Qwen publish it, fp8 with a scale for a tensor or a row
as libraries write it, MXFP4 as OpenAI publishes GPT-OSS."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.folders.hf_damage import SINGLE, Damage, config, in_order, tensors

FP8_LARGEST = 448.0
LINEARS = re.compile(
    r".*\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight|.*\.(q|kv)_[ab]_proj.*\.weight|.*experts.*_proj"
    r"|.*\.indexer\.(wq_b|wk)\.weight"
)
UNQUANTIZED = re.compile(r".*(embed_tokens|lm_head|eh_proj|\.gate\.|norm).*|.*bias")


def expand(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The scale of each number of a matrix, or of one for each expert."""
    rows, columns = shape[-2:]
    return scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]


def to_fp8(weight: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Numbers and scales; blocks at the edges may be smaller."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    largest = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).amax((-3, -1))
    scales = (largest / FP8_LARGEST).clamp(min=1e-12).to(dtype)
    numbers = weight / expand(scales.float(), weight.shape, block)
    return numbers.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn), scales


def from_fp8(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """In double precision, rounded once to fp32."""
    return (numbers.double() * expand(scales.double(), numbers.shape, block)).float()


def fp8(block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Damage:
    """Damage: a folder of one weight file whose linear layers are in fp8."""

    def change(held: dict[str, Tensor]):
        for name in [name for name in held if LINEARS.fullmatch(name) and not UNQUANTIZED.fullmatch(name)]:
            held[name], held[f"{name}_scale_inv"] = to_fp8(held[name].float(), block, dtype)

    entry = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    return in_order(config(quantization_config=entry), tensors(change))


def _fp8_of(scales: str, change_scales: Callable[[Tensor], Tensor], rows: int | None, others: tuple[str, ...]):
    """Linear layers in fp8 with a scale for `rows` rows (None: all), and further scales that are not of weights."""

    def change(held: dict[str, Tensor]):
        for name in [name for name in held if LINEARS.fullmatch(name) and not UNQUANTIZED.fullmatch(name)]:
            height, width = held[name].shape
            held[name], found = to_fp8(held[name].float(), (rows or height, width))
            held[f"{name}{scales}"] = change_scales(found).clone()
            held |= {f"{name.removesuffix('weight')}{other}": torch.tensor(0.5) for other in others}

    return tensors(change)


def _compressed(strategy: str):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip


# What quantizes a folder with one scale for a tensor, or for a row, by the library that writes it.
FP8_OF_LIBRARIES = {
    "transformers": in_order(
        config(quantization_config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
        _fp8_of("_scale_inv", lambda scales: scales[0, 0], None, ("activation_scale",))),
    "compressed-tensors": in_order(config(quantization_config=_compressed("tensor")),
                                   _fp8_of("_scale", lambda scales: scales[0], None, ("input_scale",))),
    "compressed-tensors, rows": in_order(config(quantization_config=_compressed("channel")),
                                         _fp8_of("_scale", lambda scales: scales.bfloat16(), 1, ())),
    "modelopt": in_order(config(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}),
                         _fp8_of("_scale", lambda scales: scales[0, 0], None, ("input_scale", "k_scale"))),
}  # fmt: skip


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a matrix for each expert [E, in, out], by the rule of OCP Microscaling 1.0."""
    grouped = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = grouped / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def mxfp4_tensors(held: dict[str, Tensor]):
    """Experts of GPT-OSS in MXFP4."""
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        held[f"{name}_blocks"], held[f"{name}_scales"] = to_mxfp4(held.pop(name).float())


MXFP4_CONFIG = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4",
}  # fmt: skip
mxfp4 = in_order(config(quantization_config=MXFP4_CONFIG), tensors(mxfp4_tensors))


def _widen(held: dict[str, Tensor]):
    for name in [name for name in held if ".experts." in name and not name.endswith("down_proj_bias")]:
        held[name] = torch.cat([held[name], -held[name]], 1 if name.endswith("down_proj") else -1)


# The experts of the case gpt_oss with 96 channels, three groups of MXFP4, instead of 48.
widen_experts = in_order(config(intermediate_size=96), tensors(_widen))


def _from_scales(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """`from_fp8`; scales of whole tensors and of rows tell by their shapes."""
    rows, columns = numbers.shape[-2:]
    if scales.numel() == 1 or scales.shape == (rows, 1):
        block, scales = (rows // scales.numel(), columns), scales.reshape(-1, 1)
    return from_fp8(numbers, scales, block)


def write_dequantized(source: Path, folder: Path, block: tuple[int, int] = (128, 128)) -> Path:
    """The weight file of a folder in which quantized tensors are what they stand for, in fp32."""
    held = load_file(source / SINGLE)
    for name, scales in [(name, f"{name}{end}") for name in held for end in ("_scale_inv", "_scale")]:
        if scales in held:
            held[name] = _from_scales(held[name], held.pop(scales), block)
    for name in [name for name in held if name.endswith(("activation_scale", "input_scale", "k_scale"))]:
        del held[name]
    for name in [name.removesuffix("_blocks") for name in held if name.endswith("_blocks")]:
        held[name] = from_mxfp4(held.pop(f"{name}_blocks"), held.pop(f"{name}_scales"))
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / SINGLE, metadata={"format": "pt"})
    return folder


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """In double precision, whose numbers are all exact, as fp32 [E, in, out]."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    signed = torch.cat([values, -values])
    numbers = torch.stack([signed[(blocks & 15).long()], signed[(blocks >> 4).long()]], -1).flatten(-2)
    return (numbers * (scales.double() - 127).exp2()[..., None]).flatten(-2).float().transpose(1, 2)
