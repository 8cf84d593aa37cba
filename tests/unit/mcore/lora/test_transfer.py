"""Transfers of low-rank factors of 16 bits to a model of another layout: exact, and without the weights under them."""

import pytest
import torch

from tests.helpers.models.lora_models import draw_factors, trained_state
from tests.helpers.models.reshard_pair import EP2, PP2, SP, TP2, TP4, Pair, roles
from tests.helpers.models.updates import whole_weights
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid"
LAYOUTS = {
    "dp2 tp2": (2, roles("0-1", [], "0-1", [TP2])),
    "tp2 sp dp2": (2, roles("0-1", [TP2, SP], "0-1", [])),
    "one elsewhere": (2, roles("0", [], "1", [])),
    "tp2 elsewhere": (3, roles("0-1", [TP2], "2", [])),
    "tp2 dp2 of one group": (2, roles("0-1", [TP2], "0-1", [], "--num-query-groups 1")),
    "tp2 tp4": (4, roles("0-1", [TP2], "0-3", [TP4])),
    "pp2 tp2": (2, roles("0-1", [PP2], "0-1", [TP2])),
    "tp2 pp2": (2, roles("0-1", [TP2], "0-1", [PP2])),
    "ep2 ep1": (2, roles("0-1", [EP2], "0-1", [], MOE)),
    "ep1 tp2 ep2 pp2": (4, roles("0-3", [], "0-3", [PP2, EP2], MOE)),
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
            adapter.add_frozen_factors(stages, lora, pair.args[role], groups)
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
