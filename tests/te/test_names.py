"""Models of both layer specs have the same weights: names in checkpoints, shapes, places, initial values, transfers."""

import os

import pytest
import torch
import torch.distributed as dist

if "MEGARL_TE" not in os.environ:  # only in a process of their own: Megatron would use it in other tests, too
    pytest.skip("run by tools/te_check.sh", allow_module_level=True)
import transformer_engine.pytorch  # noqa: F401  before megarl hides it without a device

from tests.helpers.models import te_models
from tests.helpers.models.te_models import IMPLS, build, empty, expected, fill, mesh, wrong
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.te
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-layer-freq ([0]+[1]*1)"
TP2, SP, EP2 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
MODELS = {  # ranks, shape, flags
    "llama": (1, "llama", ""),
    "llama tp2": (2, "llama", f"{TP2} {SP}"),
    "llama pp2": (2, "llama", PP2),
    "gpt2 tp2": (2, "gpt2", TP2),
    "norms of queries and keys": (1, "llama", "--qk-layernorm --add-qkv-bias"),
    "norms of all heads after": (1, "llama", "--qk-layernorm-all-heads --layernorm-position post"),
    "four norms": (2, "llama", f"{TP2} --layernorm-position sandwich --apply-layernorm-1p"),
    "experts": (1, "llama", f"{EXPERTS} --qk-layernorm --untie-embeddings-and-output-weights"),
    "experts ep2": (2, "llama", f"{EXPERTS} {EP2}"),
    "experts tp2 ep2": (2, "llama", f"{EXPERTS} {TP2} {SP} {EP2}"),
    "experts after": (1, "llama", f"{EXPERTS} --layernorm-position post"),
    "shared experts": (2, "llama", f"{EXPERTS} {SHARED} {TP2} {SP}"),
    "bf16": (1, "llama", f"{EXPERTS} --bf16"),
}
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "sequence_parallel", "allreduce")


def weights_of(stages, pg_collection):
    from megarl.mcore.weights.reshard_plan import model_weights

    return model_weights(stages, pg_collection)


def entries(stages, pg_collection) -> set:
    """Everything that a checkpoint stores: kind, key, shape, place, which replica."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    found = set()
    for chunk in stages:
        for value in nested_values(chunk.sharded_state_dict(metadata={"dp_cp_group": pg_collection.dp_cp})):
            for stored in nested_values({"": value.build()}) if isinstance(value, ShardedTensorFactory) else [value]:
                kind, data = type(stored).__name__, getattr(stored, "data", None)
                shape = data.shape if torch.is_tensor(data) and kind == "ShardedTensor" else None
                found.add((kind, stored.key, stored.global_shape, stored.global_offset, stored.replica_id, shape))
    return found


def attributes(stages, pg_collection) -> set:
    """What Megatron's gradient buffers, optimizer and norms of gradients ask of each parameter, by key."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    usual, found = {"allreduce": True}, set()
    for chunk in stages:
        parameters = {id(parameter): parameter for parameter in chunk.parameters()}
        for value in nested_values(chunk.sharded_state_dict(metadata={"dp_cp_group": pg_collection.dp_cp})):
            if (parameter := parameters.get(id(getattr(value, "data", None)))) is not None:
                asked = {name: getattr(parameter, name, usual.get(name)) or None for name in ATTRIBUTES}
                if not asked["tensor_model_parallel"]:
                    asked["partition_dim"] = None  # has no meaning
                found.add((value.key, tuple(parameter.shape), *asked.values()))
    return found


def compared(rank, shape, flags):
    """(differences in what is stored, in attributes, in what is planned, in initial values) of both specs."""
    args, place = mesh(flags, shape)["actor"]
    models = [build(impl, args, place.pg_collection) for impl in IMPLS]
    stored = [entries(model, place.pg_collection) for model in models]
    asked = [attributes(model, place.pg_collection) for model in models]
    weights = [weights_of(model, place.pg_collection) for model in models]
    plans = [(w.wholes, set(w.shards)) for w in weights]
    unequal = (
        [s.key for s in plans[0][1] if not torch.equal(*(w.view(s) for w in weights))] if plans[0] == plans[1] else []
    )
    return stored[0] ^ stored[1], asked[0] ^ asked[1], plans[0] == plans[1], unequal


@pytest.mark.parametrize("model", MODELS)
def test_both_specs_have_the_same_weights_under_the_same_names(model):
    size, shape, flags = MODELS[model]
    for stored, asked, is_same_plan, unequal in run_world(compared, size, shape, flags):
        assert not stored and not asked and is_same_plan and not unequal, (stored, asked, is_same_plan, unequal)


def moved(rank, impls, shape, flags):
    from megarl.mcore.weights.reshard import WeightTransfer

    roles = mesh(flags, shape)
    sides = []
    for impl, (args, place) in zip(impls, roles.values(), strict=True):
        stages = build(impl, args, place.pg_collection) if place.is_member else None
        sides.append(weights_of(stages, place.pg_collection))
    fill(sides[0])
    empty(sides[1])
    transfer = WeightTransfer(*sides, dist.group.WORLD)
    transfer.run()
    return wrong(sides[1]), len(sides[1].wholes)


LAYOUTS = {
    "tp2 dp2": ("llama", "--actor-tensor-model-parallel-size 2"),
    "pp2 tp2": ("gpt2", "--actor-pipeline-model-parallel-size 2 --reference-tensor-model-parallel-size 2"),
    "ep2 dp2": ("llama", f"{EXPERTS} --actor-expert-model-parallel-size 2"),
    "tp2 ep2": ("llama", f"{EXPERTS} --actor-tensor-model-parallel-size 2 --actor-sequence-parallel "
                         "--reference-expert-model-parallel-size 2"),
}  # fmt: skip


@pytest.mark.parametrize("impls", [IMPLS, IMPLS[::-1], (IMPLS[1], IMPLS[1])], ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_move_between_specs_and_layouts(layout, impls):
    shape, flags = LAYOUTS[layout]
    for missed, count in run_world(
        moved, 2, impls, shape, f"--role-map actor=0-1;critic=0;reward=0;reference=0-1 {flags}"
    ):
        assert not missed and count


def saved_and_loaded(rank, impls, shape, flags, folder):
    from megarl.mcore.weights import dist_checkpoint
    from tests.helpers.checkpoints import save_state

    args, place = mesh(flags, shape)["actor"]
    source, destination = (build(impl, args, place.pg_collection) for impl in impls)
    fill(weights_of(source, place.pg_collection))
    empty(weights_of(destination, place.pg_collection))
    save_state(dist_checkpoint.role_state("actor", source, None, {}, place.pg_collection), folder)
    state = dist_checkpoint.model_state("actor", destination, place.pg_collection)
    dist_checkpoint.load_weights(destination, dist_checkpoint.load_role(state, folder, place.pg_collection))
    return wrong(weights_of(destination, place.pg_collection))


@pytest.mark.parametrize("impls", [IMPLS, IMPLS[::-1]], ids="-".join)
@pytest.mark.parametrize("model", ["llama tp2", "gpt2 tp2", "experts", "experts tp2 ep2"])
def test_either_spec_loads_the_others_checkpoints(model, impls, tmp_path):
    size, shape, flags = MODELS[model]
    assert run_world(saved_and_loaded, size, impls, shape, flags, tmp_path) == [[]] * size


def test_what_is_moved_and_loaded_differs_from_key_to_key_and_place_to_place():
    """Else the tests above could not see two weights exchanged."""
    from megarl.mcore.weights.reshard_plan import GlobalTensor, WeightShard

    class Weights:
        wholes = {key: GlobalTensor((2, 4, 3), torch.float32) for key in "ab"}

    shards = [WeightShard(key, (i,), (j, 0), (2, 3)) for key in "ab" for i in (0, 1) for j in (0, 2)]
    assert len({expected(Weights, shard).sum().item() for shard in shards}) == len(shards)
    assert te_models.IMPLS[0] == "local"
