"""Routes and routings of micro-batches for tests of MoE models with eight experts, of which a token uses two."""

import torch

from megarl.mcore.attention.packing import routed_tokens
from megarl.mcore.moe.router import moe_layers_of
from megarl.mcore.moe.routes import Routing

MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
LENGTHS = [5, 1, 7, 2, 9]


def random_routes(rows: int, layers: int) -> torch.Tensor:
    """[rows, layers, 2] int16, distinct and ascending."""
    noise = torch.rand(rows, layers, 8, generator=torch.Generator().manual_seed(0))
    return noise.topk(2, dim=-1).indices.sort(dim=-1).values.to(torch.int16)


def routing_of(model, role_groups, lengths, replayed=None, **changed) -> Routing:
    """Routing of a micro-batch of these sequences on a rank without sequence parallelism."""
    rows = routed_tokens(torch.tensor(lengths), role_groups.pg_collection, False)
    given = {"role": "actor", "layers": moe_layers_of(model), "experts": 8, "rows": rows, "replayed": replayed}
    return Routing(**given | changed)
