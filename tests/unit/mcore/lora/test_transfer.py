"""Low-rank factors outside of their model: to the bit they reach a rollout's, and move through checkpoints."""

import pytest
import torch

from tests.helpers.checkpoints import save_state
from tests.helpers.models.layouts import CP2, DENSE, EP2, MOE, ONE_GROUP, PP2, SP, TP2, TP4, VP2
from tests.helpers.models.lora_models import LORA, draw_factors, stored_tensors, trainable, trained_state, update_once
from tests.helpers.models.reshard_pair import Pair, roles
from tests.helpers.models.updates import whole_weights
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

SIGMOID = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid"
LAYOUTS = {
    "dp2 tp2": (2, roles("0-1", [], "0-1", [TP2])),
    "tp2 sp dp2": (2, roles("0-1", [TP2, SP], "0-1", [])),
    "one elsewhere": (2, roles("0", [], "1", [])),
    "tp2 elsewhere": (3, roles("0-1", [TP2], "2", [])),
    "tp2 dp2 of one group": (2, roles("0-1", [TP2], "0-1", [], "--num-query-groups 1")),
    "tp2 tp4": (4, roles("0-1", [TP2], "0-3", [TP4])),
    "pp2 tp2": (2, roles("0-1", [PP2], "0-1", [TP2])),
    "tp2 pp2": (2, roles("0-1", [TP2], "0-1", [PP2])),
    "ep2 ep1": (2, roles("0-1", [EP2], "0-1", [], SIGMOID)),
    "ep1 tp2 ep2 pp2": (4, roles("0-3", [], "0-3", [PP2, EP2], SIGMOID)),
}


def transferred(rank: int, flags: str):
    """(bytes sent by each of two transfers, weights and trained state of both models by role, after each)."""
    from megarl.mcore.lora import adapter
    from megarl.mcore.lora.targets import TARGETS, LoRASettings
    from megarl.mcore.lora.transfer import PolicyTransfer

    pair, lora = Pair(f"{flags} --bf16"), LoRASettings(4, 6.0, False, TARGETS)
    sides = {"actor": pair.source, "reference": pair.destination}
    for role, stages in sides.items():
        if stages is not None:
            groups = pair.places[role].pg_collection
            adapter.add_factors(stages, lora, pair.args[role], groups, is_frozen=True)
            for linear in adapter.adapted_linears(stages) if role == "reference" else ():
                for factor in linear.factors.parameters():
                    factor.fill_(float("nan"))
    if not pair.is_member:
        return None
    if pair.source is not None:
        draw_factors(pair.source)
    groups = {role: place.pg_collection for role, place in pair.places.items()}
    models = [(sides[role], groups[role]) for role in sides]
    transfer, sent, found = PolicyTransfer(*models, pair.group, has_factors=True), [], []
    for number in range(2):
        sent.append(transfer.run())
        transfer.verify()
        here = {role: stages for role, stages in sides.items() if stages is not None}
        found.append({role: (whole_weights(stages, groups[role]), whole_weights(stages, groups[role], trained_state))
                      for role, stages in here.items()})  # fmt: skip
        for linear in adapter.adapted_linears(pair.source or ()):
            for factor in linear.factors.parameters():
                factor.mul_(-2)
    return sent, found


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("tp2 elsewhere", "ep2 ep1")))
def test_factors_arrive_to_the_bit(layout):
    size, flags = LAYOUTS[layout]
    results = [result for result in run_world(transferred, size, flags) if result]
    source = next(found for _, found in results if "actor" in found[0])
    for number in range(2):
        weights, trained = source[number]["actor"]
        factors = {key for key in trained if key.startswith("lora.")}
        assert len(factors) == 2 * 2 * 7 and all(trained[key].any() for key in factors)
        for _, found in results:
            for its_weights, its_trained in found[number].values():
                assert its_weights.keys() == weights.keys() and its_trained.keys() == trained.keys()
                assert all(torch.equal(its_weights[key], weight) for key, weight in weights.items())
                assert all(torch.equal(its_trained[key], factor) for key, factor in trained.items())
    first, second = source[0]["actor"][1], source[1]["actor"][1]
    assert all(torch.equal(second[key], -2 * first[key]) for key in factors)
    sent = [sum(sent[number] for sent, _ in results) for number in range(2)]
    if layout == "one elsewhere":  # all that the model holds, then what training changes
        assert sent[1] == sum(2 * factor.numel() for factor in trained.values())
        assert sent[0] == sent[1] + sum(2 * weight.numel() for weight in weights.values())
    assert sent[1] <= sent[0] / 4


# -- in checkpoints ------------------------------------------------------------------------------------------------

FSDP = "--use-torch-fsdp2"


MAMBA_MOE = f"{MOE} --moe-layer-freq 1 --hybrid-layer-pattern ME*M --moe-latent-size 40"


BIASED = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
    " --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
)


AROUND = [(1, ""), (2, f"{TP2} {SP}"), (2, CP2), (2, EP2), (1, "")]
EVERYWHERE = [(1, ""), (2, f"{TP2} {SP}"), (3, FSDP), (2, f"{PP2} {VP2}"), (4, f"{TP2} {SP} {FSDP}"), (1, "")]
ROUTES = [
    (f"{MOE} {BIASED}", "llama", [(1, ""), (2, f"{PP2} {VP2}"), (1, "")]),
    *map(long, [
        (DENSE, "llama", EVERYWHERE),
        (f"{DENSE} --bf16", "llama", [(1, ""), (2, FSDP), (2, TP2), (1, "")]),
        (f"{DENSE} --use-distributed-optimizer", "llama", [(2, ""), (2, TP2), (1, "")]),
        (f"{ONE_GROUP} --bf16", "llama", [(1, ""), (2, TP2), (4, f"{TP2} {SP} {FSDP}"), (1, "")]),
        (f"{ONE_GROUP} --use-distributed-optimizer", "llama", [(2, ""), (4, f"{TP4} {SP}"), (4, TP2), (1, "")]),
        (MOE, "llama", [(1, ""), (2, EP2), (2, FSDP), (4, f"{TP2} {SP} {EP2}"), (1, "")]),
        (DENSE, "recurrent", EVERYWHERE),
        (f"{MOE} --bf16", "recurrent", AROUND),
        (DENSE, "mamba", [*AROUND[:3], (2, FSDP), (1, "")]),
        (f"{DENSE} --bf16", "mamba", [*AROUND[:3], (1, "")]),
        (f"{MAMBA_MOE} --bf16", "mamba", AROUND),
    ]),
]  # fmt: skip


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


@pytest.mark.parametrize("shape, model, route", ROUTES)
def test_a_checkpoint_moves_through_layouts_to_the_bit(tmp_path, shape, model, route):
    value_head, projections = shape == DENSE and model == "llama", 10 if model == "mamba" else 4 * 7
    source, expected, tensors = None, None, []
    for leg, (size, flags) in enumerate(route):
        target = tmp_path / str(leg)
        for found in run_world(restored, size, f"{shape} {flags}", source, target, value_head, model):
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
