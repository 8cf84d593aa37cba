"""Low-rank factors in a checkpoint move through layouts to the bit."""

import pytest
import torch

from tests.helpers.checkpoints import save_state
from tests.helpers.models.layouts import CP2, DENSE, EP2, MOE, ONE_GROUP, PP2, SP, TP2, TP4, VP2
from tests.helpers.models.lora_models import LORA, stored_tensors, trainable, trained_state, update_once
from tests.helpers.models.updates import whole_weights
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

FSDP = "--use-torch-fsdp2"


MAMBA_MOE = f"{MOE} --moe-layer-freq 1 --hybrid-layer-pattern ME*M --moe-latent-size 40"


BIASED = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
    " --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
)


ROUTES = {
    DENSE: [(1, ""), (2, f"{TP2} {SP}"), (3, FSDP), (2, f"{PP2} {VP2}"), (4, f"{TP2} {SP} {FSDP}"), (1, "")],
    f"{DENSE} --bf16": [(1, ""), (2, FSDP), (2, TP2), (1, "")],
    f"{DENSE} --use-distributed-optimizer": [(2, ""), (2, TP2), (1, "")],
    f"{ONE_GROUP} --bf16": [(1, ""), (2, TP2), (4, f"{TP2} {SP} {FSDP}"), (1, "")],
    f"{ONE_GROUP} --use-distributed-optimizer": [(2, ""), (4, f"{TP4} {SP}"), (4, TP2), (1, "")],
    MOE: [(1, ""), (2, EP2), (2, FSDP), (4, f"{TP2} {SP} {EP2}"), (1, "")],
    f"{MOE} {BIASED}": [(1, ""), (2, f"{PP2} {VP2}"), (1, "")],
}


def restored(rank: int, flags: str, source, target, value_head: bool, model_shape: str):
    """Loads a checkpoint (or updates once), saves it; (weights under the factors, with factors, trained state)."""
    from megarl.mcore.lora import adapter
    from megarl.mcore.weights import dist_checkpoint

    model, place = trainable(f"{flags} {LORA}", value_head, model_shape)
    groups = place.pg_collection
    if source is None:
        update_once(model, place, value_head=value_head)
    else:
        state = model.state({"count": 0}, loading=True)
        assert model.restore(dist_checkpoint.load_role(state, source, groups)) == {"count": 3}
    if rank == 0:
        target.mkdir()
    torch.distributed.barrier()
    save_state(model.state({"count": 3}), target)
    merged, trained = whole_weights(model.model, groups), whole_weights(model.model, groups, trained_state)
    with adapter.base_weights(model.model):
        return whole_weights(model.model, groups), merged, trained


@pytest.mark.parametrize(
    "shape, value_head", by_default(((s, s == DENSE) for s in ROUTES), [(f"{MOE} {BIASED}", False)])
)
def test_a_checkpoint_moves_through_layouts_to_the_bit(tmp_path, shape, value_head):
    travel(tmp_path, shape, ROUTES[shape], value_head, "llama")


@pytest.mark.long
def test_a_checkpoint_of_gated_delta_nets_moves_through_layouts_to_the_bit(tmp_path):
    travel(tmp_path, DENSE, ROUTES[DENSE], False, "recurrent")
    route, folder = [(1, ""), (2, f"{TP2} {SP}"), (2, CP2), (2, EP2), (1, "")], tmp_path / "16 bits"
    folder.mkdir()
    travel(folder, f"{MOE} --bf16", route, False, "recurrent")


@pytest.mark.long
def test_a_checkpoint_of_mamba_moves_through_layouts_to_the_bit(tmp_path):
    for number, shape in enumerate((DENSE, f"{DENSE} --bf16", f"{MAMBA_MOE} --bf16")):
        route = [(1, ""), (2, f"{TP2} {SP}"), (2, CP2), (2, EP2 if "experts" in shape else FSDP), (1, "")]
        folder = tmp_path / str(number)
        folder.mkdir()
        travel(folder, shape, [leg for leg in route if "bf16" not in shape or FSDP not in leg[1]], False, "mamba", 10)


def travel(tmp_path, shape: str, route: list, value_head: bool, model_shape: str, projections: int = 4 * 7):
    source, expected, tensors = None, None, []
    for leg, (size, flags) in enumerate(route):
        target = tmp_path / str(leg)
        for found in run_world(restored, size, f"{shape} {flags}", source, target, value_head, model_shape):
            expected = expected or found
            for one, other in zip(found, expected, strict=True):
                assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in other)
        source = target
        tensors.append(stored_tensors(target))
    balancing = {key for key in tensors[0] if key.endswith((".expert_bias", ".expert_share"))}
    assert len(balancing) == (2 * 3 if BIASED in shape else 0) and all(tensors[0][key].any() for key in balancing)
    assert len([key for key in tensors[0] if ".optimizer." in key]) >= 2 * 2 * projections  # moments of A and B
    for key, tensor in tensors[0].items():
        assert torch.equal(tensors[-1][key], tensor), key
