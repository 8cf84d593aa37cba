"""FusedAdam of Transformer Engine: Megatron takes it where installed; its checkpoints are those of megarl's Adam."""

import os

import pytest
import torch

if "MEGARL_TE" not in os.environ:  # only in a process of their own: Megatron would use it in other tests, too
    pytest.skip("run by tools/te_check.sh", allow_module_level=True)
import transformer_engine.pytorch  # noqa: F401  before megarl hides it without a device

from tests.helpers.models.te_models import IMPLS, build, mesh
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.te
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm"
SHARDED = "--use-distributed-optimizer"
STEP = 7


def trained(impl: str, adam: type, args, place):
    """(chunks, optimizer) of a model with this Adam, which needs no device until its first step."""
    import megatron.core.optimizer as megatron_optimizer

    from megarl.mcore.training import optimizer

    stages = build(impl, args, place.pg_collection)
    before, megatron_optimizer.Adam = megatron_optimizer.Adam, adam
    try:
        wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
        return stages, optimizer.build_optimizer(wrapped, args, place.pg_collection)
    finally:
        megatron_optimizer.Adam = before


def inner(optimizer) -> list[torch.optim.Optimizer]:
    return [chained.optimizer for chained in optimizer.chained_optimizers]


def moments(stages, optimizer, place) -> dict:
    """What a checkpoint holds of the optimizer, by key and place."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from megarl.mcore.weights import dist_checkpoint

    state = dist_checkpoint.role_state("actor", stages, optimizer, {}, place.pg_collection)
    found = {}
    for value in nested_values(state["optimizer"]):
        for stored in nested_values({"": value.build()}) if isinstance(value, ShardedTensorFactory) else [value]:
            if isinstance(stored, ShardedTensor):
                found[stored.key, stored.global_shape, stored.global_offset] = stored.data.detach().clone()
    return found


def moved(rank, impls, is_fused, flags, folder):
    """(moments saved, moments loaded, classes, steps) of a checkpoint that goes from one model and Adam to another."""
    import megatron.core.optimizer as megatron_optimizer

    from megarl.mcore.training.optimizer import Adam
    from megarl.mcore.weights import dist_checkpoint, optimizer_states
    from tests.helpers.checkpoints import save_state

    args, place = mesh(flags)["actor"]
    kinds = [megatron_optimizer.Adam if fused else Adam for fused in is_fused]
    (stages, source), (others, destination) = (
        trained(impl, kind, args, place) for impl, kind in zip(impls, kinds, strict=True)
    )
    torch.manual_seed(rank)
    for adam in inner(source):
        for state in adam.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(torch.rand_like(state[name]))
        for group in adam.param_groups:
            group["step"] = STEP
    save_state(dist_checkpoint.role_state("actor", stages, source, {}, place.pg_collection), folder)
    state = dist_checkpoint.role_state("actor", others, destination, {}, place.pg_collection, loading=True)
    loaded = dist_checkpoint.load_role(state, folder, place.pg_collection)
    optimizer_states.restore(loaded, destination)
    steps = {group["step"] for adam in inner(destination) for group in adam.param_groups}
    classes = [type(adam).__module__ for adam in (*inner(source), *inner(destination))]
    return moments(stages, source, place), moments(others, destination, place), classes, steps


CASES = {  # ranks, specs, whether the Adam is FusedAdam, flags
    "own to fused": (1, IMPLS, (False, True), ""),
    "fused to own": (1, IMPLS[::-1], (True, False), ""),
    "own to fused, sharded": (2, IMPLS, (False, True), f"{SHARDED} --bf16"),
    "fused to own, sharded": (2, IMPLS[::-1], (True, False), f"{SHARDED} --bf16"),
    "experts, sharded": (2, IMPLS, (False, True), f"{SHARDED} {EXPERTS} --expert-model-parallel-size 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_from_one_adam_to_the_other(case, tmp_path):
    size, impls, is_fused, flags = CASES[case]
    for saved, loaded, classes, steps in run_world(moved, size, impls, is_fused, flags, tmp_path):
        assert saved and saved.keys() == loaded.keys()
        assert not [key for key, value in saved.items() if not torch.equal(value, loaded[key])]
        assert any(name.startswith("transformer_engine") for name in classes) and steps == {STEP}


def test_megatron_takes_fused_adam_where_it_is_installed():
    import megatron.core.optimizer as megatron_optimizer

    from megarl.mcore.training import optimizer

    assert not megatron_optimizer.USING_PYTORCH_OPTIMIZER
    assert megatron_optimizer.Adam.__name__ == "FusedAdam" and megatron_optimizer.Adam is not optimizer.Adam
