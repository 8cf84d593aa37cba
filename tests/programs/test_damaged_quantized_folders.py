"""Damaged quantized folders, and methods that are not read: exit status 2 and one line that says what is wrong."""

import pytest
import torch

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import argv, config, drop, in_order, replace, tensors
from tests.helpers.folders.hf_quantized import FP8_OF_LIBRARIES, fp8, mxfp4, widen_experts
from tests.helpers.forked_programs import check
from tests.helpers.tiers import by_default

DOWN = "model.layers.1.mlp.down_proj.weight"  # [64, 128], in blocks of [32, 48]
SCALE, BLOCK = f"{DOWN}_scale_inv", (32, 48)
EXPERTS = "model.layers.1.mlp.experts.down_proj"
BLOCKS, SCALES = f"{EXPERTS}_blocks", f"{EXPERTS}_scales"
ELSEWHERE = ["allowed are fp8, compressed-tensors, modelopt in fp8, and mxfp4", "take the model's folder in 16 bits"]


def method(name: str, **entries):
    return config(quantization_config={"quant_method": name} | entries)


def set_scale(value: float):
    def change(held: dict[str, torch.Tensor]):
        held[SCALE][1, 2] = value

    return tensors(change)


def set_exponent(held: dict[str, torch.Tensor]):
    held[SCALES][0, 3, 0] = 255


FP8 = {
    "gptq": (method("gptq", bits=4), ["quant_method 'gptq'", *ELSEWHERE]),
    "awq": (method("awq"), ["quant_method 'awq'", *ELSEWHERE]),
    "bitsandbytes": (method("bitsandbytes", load_in_4bit=True), ["quant_method 'bitsandbytes'", *ELSEWHERE]),
    "compressed-tensors": (method("compressed-tensors"), ["config_groups None: allowed is one kind of weights"]),
    "no method": (config(quantization_config={"bits": 8}), ["quant_method None", *ELSEWHERE]),
    "a list": (config(quantization_config=[1]), ["config.json: transformers cannot read it: 'list' object"]),
    "no blocks": (method("fp8", weight_block_size=None), ["scale_inv has shape [2, 3]", "one scale needs [1, 1]"]),
    "a number of blocks": (method("fp8", weight_block_size=128), ["weight_block_size 128: allowed are two whole"]),
    "one number": (method("fp8", weight_block_size=[128]), ["weight_block_size [128]: allowed are two whole numbers"]),
    "blocks of nothing": (method("fp8", weight_block_size=[0, 128]), ["weight_block_size [0, 128]: allowed"]),
    "other blocks": (method("fp8", weight_block_size=[32, 32]), ["_scale_inv has shape", "blocks of [32, 32]"]),
    "no entry": (config(quantization_config=None), ["has type F8_E4M3; allowed are F32, BF16, F16, F8_E4M3 with"]),
    "no scales": (drop(SCALE), [f"{SCALE} is missing, without which {DOWN} of type F8_E4M3 cannot be read"]),
    "empty scales": (replace(SCALE, lambda s: s[:0]), [f"{SCALE} has shape [0, 3]", "needs [2, 3]"]),
    "a row less": (replace(SCALE, lambda s: s[:1]), [f"{SCALE} has shape [1, 3]", "needs [2, 3]"]),
    "one scale": (replace(SCALE, lambda s: s[0, 0]), [f"{SCALE} has shape []", "needs [2, 3]"]),
    "integer scales": (replace(SCALE, lambda s: s.int()), [f"{SCALE} has type I32; allowed are F32, BF16"]),
    "NaN": (set_scale(float("nan")), [f"{SCALE} holds a scale that is not finite"]),
    "infinite": (set_scale(float("inf")), [f"{SCALE} holds a scale that is not finite"]),
    "flat": (replace(DOWN, lambda w: w.flatten()), [f"{DOWN} of type F8_E4M3 has shape [8192]; allowed are matrices"]),
    "scales of bf16": (replace(DOWN, lambda w: w.bfloat16()), [f"{DOWN} has a scale_inv, but is of type BF16"]),
    "another shape": (in_order(replace(DOWN, lambda w: w[:32]), replace(SCALE, lambda s: s[:1])),
                      [f"{DOWN} has shape [32, 128]; config.json describes [64, 128]"]),
    "type of the export": (config(dtype="float8_e4m3fn"), ["dtype 'float8_e4m3fn': allowed are float32, bfloat16"]),
}  # fmt: skip
ONE_SCALE = f"{DOWN}_scale"


def group(**weights):
    """config.json of compressed-tensors with other weights in a second group of layers."""
    kind = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True} | weights
    first = {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    return method("compressed-tensors", config_groups={"group_0": first, "group_1": {"weights": kind}})


# Of a folder with one scale for each tensor.
WHOLE = {
    "four bits": (group(num_bits=4, type="int"), ["num_bits 4, type 'int', strategy 'tensor', symmetric True:"]),
    "groups of columns": (group(strategy="group"), ["strategy 'group', symmetric True: allowed are 8, 'float',"]),
    "asymmetric": (group(symmetric=False), ["False: allowed are 8, 'float', 'tensor' or 'channel' and true"]),
    "lists": (group(num_bits=[8], strategy={}), ["num_bits [8], type 'float', strategy {}, symmetric True: allowed"]),
    "two kinds": (group(strategy="channel"), ["allowed is one kind of weights of compressed-tensors, in fp8"]),
    "no groups": (method("compressed-tensors", config_groups={}), ["config_groups {}: allowed is one kind of weights"]),
    "no weights": (method("compressed-tensors", config_groups={"a": 3}), ["num_bits None, type None, strategy None"]),
    "a rotation": (method("compressed-tensors", transform_config={"a": 1}), ["transform_config: allowed is none"]),
    "rows": (method("compressed-tensors", config_groups={"a": {"weights": {
        "num_bits": 8, "type": "float", "strategy": "channel"}}}), ["has shape [1]", "one scale for each row needs"]),
    "NVFP4": (method("modelopt", quant_algo="NVFP4"), ["quant_algo 'NVFP4' of modelopt: allowed is 'FP8'"]),
    "no algorithm": (method("modelopt"), ["quant_algo None of modelopt: allowed is 'FP8'"]),
    "no scale": (drop(ONE_SCALE), [f"{ONE_SCALE} is missing, without which {DOWN} of type F8_E4M3 cannot be read"]),
    "NaN": (replace(ONE_SCALE, lambda s: s * float("nan")), [f"{ONE_SCALE} holds a scale that is not finite"]),
    "two scales": (replace(ONE_SCALE, lambda s: torch.cat([s, s])), [f"{ONE_SCALE} has shape [2]", "needs [1, 1]"]),
    "an unknown scale": (tensors(lambda held: held.update({f"{DOWN}_scale_2": torch.ones(1)})), ["_scale_2"]),
    "a wide scale of activations": (tensors(lambda held: held.update({
        DOWN.replace("weight", "input_scale"): torch.ones(4)})), ["input_scale belongs to quantized weights"]),
}  # fmt: skip
MXFP4 = {
    "no scales": (drop(SCALES), [f"{SCALES} is missing, without which {BLOCKS} cannot be read"]),
    "no blocks": (drop(BLOCKS), [f"{BLOCKS} is missing, to which {SCALES} belongs"]),
    "three axes": (replace(BLOCKS, lambda b: b.flatten(2)), [f"{BLOCKS} has shape", "groups of 32 values, 16]"]),
    "bytes of a group": (replace(BLOCKS, lambda b: b[..., :8]), [f"{BLOCKS} has shape", "groups of 32 values, 16]"]),
    "fewer scales": (replace(SCALES, lambda s: s[:, :5]), [f"{SCALES} has shape [8, 5, 3]; {BLOCKS} needs"]),
    "signed": (replace(BLOCKS, lambda b: b.to(torch.int8)), [f"{BLOCKS} has type I8; allowed is U8"]),
    "NaN": (tensors(set_exponent), [f"{SCALES} holds a scale that is not finite"]),
    "both": (tensors(lambda held: held.update({EXPERTS: torch.ones(8, 96, 64)})), [f"both {EXPERTS} and {BLOCKS}"]),
}


def refused(tmp_path, folder, needles):
    """The last line; one before it may say that the folder is quantized."""
    status, printed, others = check(argv(tmp_path, folder), "sft", size=2)
    *warnings, line = others.splitlines()
    assert (status, printed) == (2, "") and all("tensors are quantized" in each for each in warnings), others
    assert all(needle in line for needle in [f"megarl: error: --hf-model {folder}", *needles]), line


QUANTIZED = {  # kind -> the folder that it is a change of, the change, damages
    "fp8": ("llama2", fp8(BLOCK), FP8),
    "fp8 with one scale": ("llama2", FP8_OF_LIBRARIES["compressed-tensors"], WHOLE),
    "mxfp4": ("gpt_oss", in_order(widen_experts, mxfp4), MXFP4),
}
CHOSEN = {"fp8": ("gptq", "no scales", "a row less", "NaN"), "fp8 with one scale": ("four bits", "NaN"),
          "mxfp4": ("fewer scales", "NaN")}  # fmt: skip


@pytest.mark.parametrize("kind, name", by_default(
    [(kind, name) for kind, (_, _, damages) in QUANTIZED.items() for name in damages],
    [(kind, name) for kind, names in CHOSEN.items() for name in names],
))  # fmt: skip
def test_damaged_quantized_folders(kind, name, tmp_path):
    case, quantize, damages = QUANTIZED[kind]
    damage, needles = damages[name]
    folder = hf_folders.write_folder(case, tmp_path / "folder")
    in_order(quantize, damage)(folder)
    refused(tmp_path, folder, needles)
