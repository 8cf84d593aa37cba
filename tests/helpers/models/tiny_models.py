"""Tiny models for tests: Megatron namespaces of two shapes, and a model built inside a world of ranks."""

import functools
import zlib

import torch
import torch.distributed as dist

from megarl import arguments
from megarl.comm import role_mesh
from tests.helpers.worlds import SAFETY

VOCAB = 20  # padded to 32 columns: the padding must never be seen
_KIMI = (  # Kimi delta attention, then multi-latent attention
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8"
    " --v-head-dim 14 --qk-layernorm --experimental-attention-variant gated_delta_net --linear-channel-decay"
    " --linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 16"
    " --linear-value-head-dim 16 --make-vocab-size-divisible-by 32 --init-method-std 0.1"
)
SHAPES = {
    "llama": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2"
    " --make-vocab-size-divisible-by 32 --init-method-std 0.1",
    "latent": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16"
    " --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 14 --qk-layernorm --make-vocab-size-divisible-by 32"
    " --init-method-std 0.1",
    "recurrent": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2 --qk-layernorm"
    " --apply-layernorm-1p --attention-output-gate --experimental-attention-variant gated_delta_net"
    " --linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 24"
    " --linear-value-head-dim 16 --make-vocab-size-divisible-by 32 --init-method-std 0.1",
    "kimi": f"{_KIMI} --position-embedding-type none --linear-gate-rank 8",
    "ling": f"{_KIMI} --q-lora-rank 24 --attention-output-gate --linear-decay-bound -4",
    "mamba": "--num-layers 4 --hybrid-layer-pattern M-*M --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128"
    " --squared-relu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2"
    " --position-embedding-type none --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 24"
    " --mamba-dt-min 0.001 --make-vocab-size-divisible-by 32 --init-method-std 0.1",
    "gpt2": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128"
    " --position-embedding-type learned_absolute --untie-embeddings-and-output-weights"
    " --make-vocab-size-divisible-by 32 --init-method-std 0.1",
}
LENGTHS = "--max-prompt-length 24 --max-response-length 24"
TRAINING = "--lr 1e-3"


# Layers of "latent" whose queries choose 8 keys.
CHOOSING = "--dsa-indexer-topk 8 --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 16"


def parse_roles(flags: str, size: int, shape: str = "llama", program: str = "sft") -> dict:
    """RoleSettings of each role for `size` ranks; program 'sft' has the actor alone."""
    learning = "" if program == "evaluate" else TRAINING
    return arguments.parse(f"{SHAPES[shape]} {LENGTHS} {learning} {flags}".split(), size, program).roles


@functools.cache  # one set of groups for all models of a process, as programs have it
def join_actor(flags: str = "", shape: str = "llama", program: str = "sft"):
    """(Megatron args, role groups) of the actor, on every rank of the running world."""
    roles = parse_roles(flags, dist.get_world_size(), shape, program)
    return roles["actor"].megatron, role_mesh.create_mesh(roles, SAFETY)["actor"]


def build(flags: str = "", shape: str = "llama", value_head: bool = False):
    """(model, args, role groups) of the actor with random biases, since Megatron's zeros would hide errors."""
    stages, args, place = build_stages(flags, shape, value_head)
    (model,) = stages
    return model, args, place


def build_stages(flags: str = "", shape: str = "llama", value_head: bool = False):
    """(stages, args, role groups) of the actor, as `build`, for any number of pipeline stages on a rank."""
    from megarl.mcore.model.gpt import build_model

    args, place = join_actor(flags, shape)
    stages = build_model(args, VOCAB, place.pg_collection, value_head)
    for chunk in stages:
        draw_vectors(chunk, place.pg_collection)
    return stages, args, place


def draw_vectors(chunk, pg_collection):
    """Fills the transformer's biases and norm weights with random numbers that are the same in every layout."""
    from megarl.mcore.model.initialization import global_name

    rank, size = dist.get_rank(pg_collection.tp), dist.get_world_size(pg_collection.tp)
    for name, parameter in chunk.named_parameters():
        if parameter.dim() == 1 and name.startswith("decoder."):
            is_split = getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(zlib.crc32(global_name(name, chunk, pg_collection).encode()))
            whole = torch.randn(len(parameter) * (size if is_split else 1), generator=generator) * 0.2
            parts = getattr(parameter, "parts", [len(parameter)])  # of each of which a rank has its share
            with torch.no_grad():
                if is_split:
                    wholes = whole.split([rows * size for rows in parts])
                    parameter.copy_(torch.cat([part.chunk(size)[rank] for part in wholes]))
                else:
                    parameter.copy_(1 + whole)


def gather_parameters(model, group, gated: bool) -> dict:
    """Every parameter as one rank would hold it: the tensor-parallel shards concatenated."""
    return {name: whole_tensor(name, p, p.detach(), group, gated) for name, p in model.named_parameters()}


def whole_tensor(name: str, parameter, value, group, gated: bool):
    """`value` (of the parameter's shape: weights, gradients) gathered from the ranks of the group."""
    size = dist.get_world_size(group)
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return value.clone()
    shares = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(shares, value.contiguous(), group=group)
    # Each share holds its rows of the gates, then of the ups, or of other parts.
    parts = [len(value) // 2] * 2 if gated and "linear_fc1" in name else getattr(parameter, "parts", None)
    if parts is not None:
        return torch.cat([torch.cat(part) for part in zip(*(share.split(parts) for share in shares), strict=True)])
    return torch.cat(shares, dim=parameter.partition_dim)


def ragged_tokens(lengths, seed: int = 0):
    """(tokens [T], lengths [N]) of random sequences."""
    lengths = torch.tensor(lengths)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (int(lengths.sum()),), generator=generator), lengths


def one_microbatch(rows: list[list[int]]):
    """Sequences of tokens in one micro-batch, in the form of `microbatches`."""
    from megarl.batch import Batch
    from megarl.comm.microbatches import build_microbatches

    tokens, lengths = torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows])
    everything = torch.arange(len(rows))
    return build_microbatches(Batch(sequence_ids=everything, lengths=lengths, tokens=tokens), [everything])


def farthest(one, other) -> float:
    """Largest difference of two tensors, relative for numbers above 1."""
    return float(((one - other).abs() / other.abs().clamp_min(1)).max())
