"""Initial weights drawn from the seed and the weight's name, equal in every parallel layout.

Megatron draws one matrix after another from one generator, so initial weights depend on the layout. Here each matrix
has its own generator, seeded by its global name; a rank draws one whole matrix at a time and keeps its slice.
"""

import hashlib
import math
import re

import torch
import torch.distributed as dist
from torch import Tensor

# The standard deviation of these falls with depth (1909.08053 §3, GPT-2).
SCALED = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight", "fc2_latent_proj.weight")


def initialize(chunk, seed: int, pg_collection):
    """Initializes a model chunk: matrices by the config's methods, biases to 0; norms keep their values."""
    for name, parameter in chunk.named_parameters():
        whole_name = global_name(name, chunk, pg_collection)
        is_scalar_head = name == "output_layer.weight" and parameter.shape[0] == 1
        if parameter.dim() > 1 and not is_scalar_head:
            _draw(whole_name, parameter, chunk.config, seed, pg_collection)
        elif whole_name.endswith(".bias") and "layernorm" not in name:
            torch.nn.init.zeros_(parameter)
        elif whole_name.endswith(".A_log"):
            _draw_decays(whole_name, parameter, seed, pg_collection.tp)
        elif whole_name.endswith(".dt_bias") and getattr(parameter, "draws_steps", False):
            _draw_steps(whole_name, parameter, seed, pg_collection.tp)


def global_name(name: str, chunk, pg_collection) -> str:
    """Returns a parameter's name in the whole model: layers and experts numbered from 0 over all stages and ranks.

    Grouped experts, whose layers have a `weight3` of expert 3, get the names of experts with layers of their own. Names
    in a module of transformers are those of the whole model from the start.
    """
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # a later stage's copy of the first stage's embedding

    def layer(match: re.Match) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match) -> str:
        local = chunk.config.num_moe_experts // dist.get_world_size(pg_collection.ep)
        return f"local_experts.{dist.get_rank(pg_collection.ep) * local + int(match[1])}."

    name = re.sub(r"\.experts\.(linear_fc\d)\.(\w+?)(\d+)$", r".experts.local_experts.\3.\1.\2", name)
    return re.sub(r"local_experts\.(\d+)\.", expert, re.sub(r"(?<!model\.)decoder\.layers\.(\d+)\.", layer, name))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())


def draw_uniform(whole_name: str, seed: int, shape: tuple[int, ...], bound: float) -> Tensor:
    """A whole fp32 matrix on the host, uniform in ±`bound`."""
    generator = torch.Generator().manual_seed(_seed(seed, whole_name))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def _draw(whole_name: str, parameter: Tensor, config, seed: int, pg_collection):
    is_expert = ".local_experts." in whole_name
    group = pg_collection.expt_tp if is_expert else pg_collection.tp
    is_split = getattr(parameter, "tensor_model_parallel", False)
    shards, shape = dist.get_world_size(group) if is_split else 1, list(parameter.shape)
    axis = parameter.partition_dim if is_split else 0
    shape[axis] *= shards
    # Devices draw other numbers than the host; `--use-cpu-initialization` gives the same weights on both.
    on = torch.device("cpu") if config.use_cpu_initialization else parameter.device
    whole = torch.empty(shape, dtype=parameter.dtype, device=on)
    devices = [parameter.device] if parameter.is_cuda else []
    with torch.random.fork_rng(devices):
        # torch.manual_seed keeps a stack trace for each kind of device that is not in use yet.
        draw_from = torch.manual_seed if devices else torch.default_generator.manual_seed
        draw_from(_seed(seed, whole_name))
        if whole_name.endswith(SCALED):
            config.output_layer_init_method(whole)
        else:
            (config.embedding_init_method if whole_name.startswith("embedding.") else config.init_method)(whole)
    # A rank holds its shard of the gate projection, then the same shard of the up projection.
    halves = 2 if whole_name.endswith("linear_fc1.weight") and config.gated_linear_unit else 1
    parts = getattr(parameter, "parts", [parameter.shape[axis] // halves] * halves)  # rows of each shard
    rank = dist.get_rank(group) if is_split else 0
    wholes = whole.split([rows * shards for rows in parts], axis)
    parameter.copy_(torch.cat([part.chunk(shards, axis)[rank] for part in wholes], axis))


@torch.no_grad()
def _draw_decays(whole_name: str, parameter: Tensor, seed: int, group):
    """Logarithms of numbers between 1 and 16, as of Megatron's gated delta net."""
    whole = draw_uniform(whole_name, seed, (len(parameter) * dist.get_world_size(group),), 7.5).add_(8.5).log_()
    parameter.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])


@torch.no_grad()
def _draw_steps(whole_name: str, parameter: Tensor, seed: int, group):
    """What gives time steps between 0.001 and 0.1, their logarithms uniform, as of Megatron's Mamba-2: its inverse
    softplus."""
    low, high = math.log(0.001), math.log(0.1)
    size = len(parameter) * dist.get_world_size(group)
    steps = draw_uniform(whole_name, seed, (size,), (high - low) / 2).add_((high + low) / 2).exp_()
    whole = steps + torch.log(-torch.expm1(-steps))
    parameter.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])
