"""`python -m tests.helpers.models.compiled_fla`: kernels of flash-linear-attention that a pass launches, for
layers of Qwen3-Next in bf16, compiled for an H100 without one: the first and the last variant of each; as JSON.

[name, bytes of code of each variant, bytes of shared memory].
"""

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.runs import NONE, Runs

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
GROUPS, HEADS, CHANNELS, ROWS = 2, 4, 128, 130
launched: dict[str, list[list[int]]] = {}  # kernel -> sizes of its variants


def kind_of(value) -> str:
    """The type of an argument, as Triton writes it."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def sizes_of(kernel, arguments: dict, config: triton.Config) -> list[int]:
    """Bytes of code and of shared memory of a variant of a kernel for these arguments."""
    arguments = arguments | config.kwargs
    while isinstance(kernel, Heuristics):
        arguments = arguments | {name: decide(arguments) for name, decide in kernel.values.items()}
        kernel = kernel.fn
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    constants |= {name for name, value in arguments.items() if value is None}
    types = {name: "constexpr" if name in constants else kind_of(arguments[name]) for name in kernel.arg_names}
    source = ASTSource(kernel, types, {name: arguments[name] for name in constants}, {})
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return [len(compiled.asm["cubin"]), compiled.metadata.shared]


def compile_variants(self, *args, grid, **kwargs):
    """Instead of a launch of a kernel with variants."""
    arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
    variants = self.configs[:: max(1, len(self.configs) - 1)]
    if self.base_fn.__name__ not in launched:
        launched[self.base_fn.__name__] = [sizes_of(self.fn, arguments, config) for config in variants]


def compile_alone(self, *args, grid, warmup, **kwargs):
    """Instead of a launch of a kernel without variants."""
    arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
    launched[self.fn.__name__] = [sizes_of(self, arguments, triton.Config({}))]


def main():
    """Prints the kernels of prompts that continue states, and of a training step."""
    Autotuner.run, JITFunction.run = compile_variants, compile_alone
    runs = Runs(torch.tensor([[0, 70, NONE, 0], [70, 60, 0, NONE]]), 1, 4)
    channels = (2 * GROUPS + HEADS) * CHANNELS
    shapes = (ROWS, channels), (ROWS, HEADS), (ROWS, HEADS), (channels, 1, 4), (HEADS,), (HEADS,)
    inputs = Inputs(*(torch.zeros(shape, requires_grad=True) for shape in shapes))
    inputs.by_chunks(HeadSizes(GROUPS, HEADS, CHANNELS, CHANNELS, torch.bfloat16), runs).sum().backward()
    print(json.dumps([*launched.items()]))


if __name__ == "__main__":
    main()
