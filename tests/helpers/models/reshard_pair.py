"""A source and a destination of a weight transfer, each in its own layout."""

import torch
import torch.distributed as dist

from tests.helpers.models.tiny_models import VOCAB, draw_vectors, parse_roles
from tests.helpers.worlds import SAFETY

DEEP = "--num-layers 4"


def roles(actor: str, actor_flags: list[str], reference: str, reference_flags: list[str], model: str = "") -> str:
    """Flags of a source (the actor) and a destination (the reference) on their ranks."""
    of_roles = {"actor": actor_flags, "reference": reference_flags}
    own = [flag.replace("--", f"--{role}-", 1) for role, flags in of_roles.items() for flag in flags]
    return f"--role-map actor={actor};critic=0;reward=0;reference={reference} {model} {' '.join(own)}"


class Pair:
    """A source and a destination with equal weights in two layouts; the destination's are then overwritten with NaN."""

    def __init__(self, flags: str, shape: str = "llama"):
        from megarl.comm import role_mesh

        settings = parse_roles(flags, dist.get_world_size(), shape, "rl")
        places = role_mesh.create_mesh(settings, SAFETY)
        self.places = {role: places[role] for role in ("actor", "reference")}
        self.args = {role: settings[role].megatron for role in self.places}
        for args in self.args.values():  # a persistent buffer; models that are not trained reject the flag itself
            args.moe_router_enable_expert_bias = bool(args.num_experts)
        ranks = sorted({*self.places["actor"].ranks, *self.places["reference"].ranks})
        self.group, self.is_member = dist.new_group(ranks), dist.get_rank() in ranks
        self.source, self.destination = self.build("actor"), self.build("reference")
        self.expected = named(self.destination)
        for tensor in tensors(self.destination).values():
            tensor.fill_(float("nan"))

    def build(self, role: str):
        from megarl.mcore.model.gpt import build_model

        pg_collection = self.places[role].pg_collection
        stages = build_model(self.args[role], VOCAB, pg_collection) if self.places[role].is_member else None
        for chunk in stages or ():
            draw_vectors(chunk, pg_collection)
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    layer.mlp.router.expert_bias.copy_(torch.arange(4) + 10.0 * layer.layer_number)
        return stages

    def transfer(self, **options):
        from megarl.mcore.weights.reshard import WeightTransfer
        from megarl.mcore.weights.reshard_plan import model_weights

        models, places = (self.source, self.destination), self.places.values()
        weights = [model_weights(model, place.pg_collection) for model, place in zip(models, places, strict=True)]
        return WeightTransfer(*weights, self.group, **options)

    def check(self, expect=lambda tensor: tensor):
        """Every tensor of the destination on this rank, to the bit."""
        found = named(self.destination)
        wrong = [name for name, tensor in self.expected.items() if not torch.equal(found[name], expect(tensor))]
        assert not wrong and found.keys() == self.expected.keys(), wrong


def tensors(stages) -> dict:
    """Everything that a checkpoint would hold on this rank, by chunk and name."""
    states = [chunk.state_dict() for chunk in stages or ()]
    return {f"{i}.{name}": t for i, state in enumerate(states) for name, t in state.items() if t is not None}


def named(stages) -> dict:
    """Copies of `tensors`."""
    return {name: tensor.clone() for name, tensor in tensors(stages).items()}
