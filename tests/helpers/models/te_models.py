"""Models with the layers of Transformer Engine, built on a CPU: their weights can be looked at, not computed with."""

import contextlib
import zlib
from argparse import Namespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.helpers.models.tiny_models import VOCAB, parse_roles
from tests.helpers.worlds import SAFETY

IMPLS = ("local", "transformer_engine")


@contextlib.contextmanager
def _a_device_is_claimed():
    """Transformer Engine asks torch for a device before it makes a layer; megarl must still see none."""
    from megarl.mcore import device

    with mock.patch.object(device, "has_cuda", return_value=False):
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            yield


def build(impl: str, args, pg_collection):
    """The chunks of a role's model with the layers of `--transformer-impl IMPL`; flags refuse them on a CPU."""
    from megarl.mcore.model.gpt import build_model

    with _a_device_is_claimed():
        return build_model(Namespace(**vars(args) | {"transformer_impl": impl}), VOCAB, pg_collection)


def mesh(flags: str, shape: str = "llama") -> dict:
    """(Megatron args, role groups) of the actor and of the reference, by role; groups are of the running world."""
    from megarl.comm import role_mesh

    settings = parse_roles(flags, dist.get_world_size(), shape, "rl")
    places = role_mesh.create_mesh(settings, SAFETY)
    return {role: (settings[role].megatron, places[role]) for role in ("actor", "reference")}


def expected(weights, shard) -> torch.Tensor:
    """What `fill` writes into a shard of `LocalWeights`: numbers that depend on its key and its place in the whole."""
    whole = weights.wholes[shard.key]
    generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
    values = torch.randn(whole.shape, generator=generator).to(whole.dtype)[shard.index]
    return values[tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.shape, strict=True))]


def fill(weights):
    """Writes `expected` into all weights that a rank holds."""
    for shard in weights.shards:
        weights.view(shard).copy_(expected(weights, shard))


def empty(weights):
    """Overwrites all weights that a rank holds with NaN."""
    for shard in weights.shards:
        weights.view(shard).fill_(float("nan"))


def wrong(weights) -> list[str]:
    """Keys of the shards that are not `expected`, to the bit."""
    return [s.key for s in weights.shards if not torch.equal(weights.view(s), expected(weights, s))]
