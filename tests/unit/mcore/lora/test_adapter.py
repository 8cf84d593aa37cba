"""Low-rank factors in every parallel layout: gradients of the dense computation, frozen weights, equal numbers."""

import functools

import pytest
import torch

from tests.helpers.models import layouts
from tests.helpers.models.layouts import CP2, DENSE, EP2, MOE, ONE_GROUP, PP2, RECOMPUTE, SP, TP2, TP4
from tests.helpers.models.lora_models import (
    LORA,
    SCALE,
    draw_factors,
    trainable,
    trained_state,
    update_once,
    whole_gradients,
)
from tests.helpers.models.updates import whole_weights
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

FSDP = "--use-torch-fsdp2"
CHANNELS, HEADS = 16, 4  # of the tiny llama
ALIKE = """
    one tp2 tp2-sp pp2 pp2-vp2 dp2 cp2 tp2-pp2 tp2-sp-recompute tp2-ep2-sp tp2-one-group tp4-sp-one-group
""".split()
LAYOUTS = {name: layouts.LAYOUTS[name] for name in ALIKE} | {
    "moe": (1, MOE, ""),
    "ep2": (2, MOE, EP2),
    "tp2-sp-moe": (2, MOE, f"{TP2} {SP}"),
    "fsdp2": (2, DENSE, FSDP),
    "fsdp3": (3, DENSE, FSDP),
    "tp2-sp-fsdp2": (4, DENSE, f"{TP2} {SP} {FSDP}"),
    "cp2-fsdp2-recompute": (2, DENSE, f"{CP2} {RECOMPUTE} {FSDP}"),
    "fsdp2-moe": (2, MOE, FSDP),
    "tp4-sp-two-groups": (4, DENSE, f"{TP4} {SP} {RECOMPUTE}"),
    "tp2-sp-fsdp2-one-group": (4, ONE_GROUP, f"{TP2} {SP} {FSDP}"),
}
LATENT_LAYOUTS = {name: LAYOUTS[name] for name in ("tp2", "tp2-sp", "cp2", "tp2-ep2-sp")}
LATENT_LAYOUTS["pp2-recompute"] = (2, DENSE, f"{PP2} --recompute-activations")
OF_STATES = ("tp2-sp", "tp2-one-group", "pp2-vp2", "fsdp2", "tp2-sp-fsdp2", "tp2-ep2-sp")
RECURRENT_LAYOUTS = {name: LAYOUTS[name] for name in OF_STATES} | {"cp2-recompute": (2, DENSE, f"{CP2} {RECOMPUTE}")}
CHANNEL_LAYOUTS = {name: RECURRENT_LAYOUTS[name] for name in RECURRENT_LAYOUTS if name != "tp2-one-group"}
MAMBA_MOE = f"{MOE} --moe-layer-freq 1 --hybrid-layer-pattern ME*M --moe-latent-size 40"
MAMBA_LAYOUTS = RECURRENT_LAYOUTS | {"dp2": (2, DENSE, ""), "tp2-ep2-sp": (4, MAMBA_MOE, f"{TP2} {SP} {EP2}")}
MODELS = {  # its layouts, and projections of all its layers
    "llama": (LAYOUTS, 4 * 7), "latent": (LATENT_LAYOUTS, 4 * 8), "mamba": (MAMBA_LAYOUTS, 2 * 2 + 4 + 2),
    "recurrent": (RECURRENT_LAYOUTS, 2 * (7 + 3) + 2 * (4 + 3)),
    "kimi": (CHANNEL_LAYOUTS, 2 * (9 + 3) + 2 * (4 + 3)), "ling": (CHANNEL_LAYOUTS, 2 * (7 + 3) + 2 * (6 + 3)),
}  # fmt: skip
ROWS = [(model, layout) for model, (of_model, _) in MODELS.items() for layout in of_model]
SPACE_PARTS = ("z", "x", "B", "C", "dt")  # of the gradient of Mamba-2's first projection
PARTS = {"in_proj_q": "query", "in_proj_k": "key", "in_proj_v": "value", "in_proj_z": "z", "in_proj_b": "beta",
         "in_proj_a": "alpha"}  # fmt: skip  # of the gradient of a gated delta net's first projection


def low_rank(rank: int, flags: str, model_shape: str = "llama"):
    """(weights with factors, factors, their gradients, loss, norm) of a model with drawn factors."""
    model, place = trainable(f"{flags} --clip-grad 0 {LORA}", shape=model_shape)
    draw_factors(model.model)
    groups = place.pg_collection
    weights = whole_weights(model.model, groups)
    factors = whole_weights(model.model, groups, trained_state)
    numbers = update_once(model, place)
    return weights, factors, whole_gradients(model.model, groups, trained_state), *numbers


def dense(rank: int, flags: str, model_shape: str = "llama"):
    """(loss, gradients of all weights) of full fine-tuning from the weights that contain the factors."""
    adapted, place = trainable(f"{flags} --clip-grad 0 {LORA}", shape=model_shape)
    draw_factors(adapted.model)
    model, _ = trainable(f"{flags} --clip-grad 0", shape=model_shape)
    for chunk, other in zip(model.model, adapted.model, strict=True):
        state = {name: value for name, value in other.state_dict().items() if not name.startswith("adapter.")}
        chunk.load_state_dict(state)
    loss, _ = update_once(model, place)
    return loss, whole_gradients(model.model, place.pg_collection)


@functools.cache
def of_one_rank(shape: str, model_shape: str = "llama"):
    return run_world(low_rank, 1, shape, model_shape)[0], run_world(dense, 1, shape, model_shape)[0]


def rows_of(projection: str, count: int, shape: str):
    """Rows of a projection among the `count` rows of the whole fused weight."""
    has_gates = shape == "recurrent"
    if projection in ("q_proj", "k_proj", "v_proj") and shape != "kimi":
        heads = HEADS * (1 + has_gates)
        queries = heads // ((count // CHANNELS - heads) // 2)  # of each group
        grouped = torch.arange(count).view(-1, queries + 2, CHANNELS)
        return grouped[:, {"q_proj": slice(0, queries), "k_proj": queries, "v_proj": queries + 1}[projection]].flatten()
    halves = dict.fromkeys(("gate_proj", "g_a_proj"), slice(0, count // 2))
    halves |= dict.fromkeys(("up_proj", "f_a_proj"), slice(count // 2, count))
    halves = halves if shape != "mamba" else {}
    return torch.arange(count)[halves.get(projection, slice(0, count))]


def expected_gradients(factors: dict, gradients: dict, shape: str) -> dict:
    """dA = s·Bᵀ·dW and dB = s·dW·Aᵀ for every pair of factors, stacked over experts."""
    found = {}
    for key in (key for key in factors if key.endswith(".lora_A")):
        a, b = factors[key], factors[key.removesuffix("A") + "B"]
        _, layers, number, *middle, projection, _ = key.removeprefix("lora.").split(".")
        name = ".".join(middle).replace("local_experts", "experts") + ".weight"
        parts = SPACE_PARTS if projection == "in_proj" else [PARTS[projection]] if projection in PARTS else None
        names = [name] if parts is None else [f"{name}.{part}" for part in parts]
        whole = torch.cat(
            [
                gradients[f"decoder.{layers}.{each}"][int(number)]
                if f"decoder.{layers}.{each}" in gradients
                else gradients[f"decoder.layers.{number}.{each}"]
                for each in names
            ],
            dim=-2,
        )
        dw = whole[..., rows_of(projection, whole.shape[-2], shape), :]
        found[key] = SCALE * b.mT @ dw
        found[key.removesuffix("A") + "B"] = SCALE * dw @ a.mT
    return found


FIRST = [*((model, "tp2-sp") for model in MODELS if model != "ling"), ("llama", "pp2-vp2"), ("llama", "ep2")]


@pytest.mark.parametrize("model_shape, layout", by_default(ROWS, FIRST))
def test_gradients_equal_those_of_the_dense_computation(model_shape, layout):
    of_model, projections = MODELS[model_shape]
    size, shape, flags = of_model[layout]
    (one_weights, one_factors, _, _, one_norm), (dense_loss, gradients) = of_one_rank(shape, model_shape)
    expected = expected_gradients(one_factors, gradients, model_shape)
    for weights, factors, found, loss, norm in run_world(low_rank, size, f"{shape} {flags}", model_shape):
        assert weights.keys() == one_weights.keys() and factors.keys() == one_factors.keys()
        assert all(torch.equal(weights[key], weight) for key, weight in one_weights.items())
        assert all(torch.equal(factors[key], factor) for key, factor in one_factors.items())
        assert found.keys() == expected.keys() and len(found) == 2 * projections
        for key, gradient in expected.items():
            largest = float(gradient.abs().max())
            of_decays = "in_proj_a" in key or ".f_" in key
            assert largest > (1e-6 if of_decays else 1e-4), key  # of decays close to 1
            assert (found[key] - gradient).abs().max() <= min(2e-6 * max(1, largest), 0.02 * largest), key
        assert loss == pytest.approx(dense_loss, rel=1e-5, abs=2e-6)
        norm_of_dense = torch.stack([g.double().square().sum() for g in expected.values()]).sum().sqrt()
        assert norm == pytest.approx(float(norm_of_dense), rel=1e-5) and norm == pytest.approx(one_norm, rel=1e-5)


def several_updates(rank: int, flags: str, value_head: bool = False, model_shape: str = "llama"):
    """(weights under the factors before, after, weights with factors after, trained state after) three updates."""
    from megarl.mcore.lora import adapter

    model, place = trainable(f"{flags} {LORA}", value_head, model_shape)
    groups = place.pg_collection
    before = whole_weights(model.model, groups)
    for _ in range(3):
        update_once(model, place, value_head=value_head)
    with adapter.base_weights(model.model):
        after = whole_weights(model.model, groups)
    return before, after, whole_weights(model.model, groups), whole_weights(model.model, groups, trained_state)


PRECISIONS = [
    (flags, head)
    for flags in ("", "--use-distributed-optimizer", "--bf16", FSDP, f"{FSDP} --bf16")
    for head in (False, True)
]


@pytest.mark.parametrize("flags, value_head", by_default(PRECISIONS, [("--bf16", False), (FSDP, True)]))
def test_only_the_factors_and_a_scalar_head_change(flags, value_head):
    before, after, merged, trained = run_world(several_updates, 2, f"{DENSE} {flags}", value_head)[0]
    heads = {"output_layer.weight", "output_layer.bias"} if value_head else set()
    for key, weight in before.items():
        assert torch.equal(after[key], weight) == (key not in heads), key
    changed = {key for key in before if not torch.equal(merged[key], before[key])}
    linears = {key for key in before if "linear_" in key and "norm" not in key}
    assert changed == heads | (set() if "bf16" in flags else linears) and len(linears) == 4
    assert {key for key in trained if not key.startswith("lora.")} == heads
    assert all(trained[key].any() for key in trained if value_head is False)


UPDATED = "tp2-sp pp2-vp2 dp2 tp2-ep2-sp fsdp3 fsdp2-moe tp4-sp-one-group tp2-sp-fsdp2-one-group".split()
UPDATES = [row for row in ROWS if row[0] not in ("llama", "latent") or row[0] == "llama" and row[1] in UPDATED]


@pytest.mark.parametrize("model_shape, layout", by_default(UPDATES, [("llama", "fsdp2-moe")]))
def test_updates_do_not_depend_on_the_layout(model_shape, layout):
    size, shape, flags = MODELS[model_shape][0][layout]
    options = "" if FSDP in flags else "--use-distributed-optimizer"
    ((_, _, one_merged, one_trained),) = run_world(several_updates, 1, f"{shape} {options}", False, model_shape)
    found = run_world(several_updates, size, f"{shape} {flags} {options}", False, model_shape)
    for before, after, merged, trained in found:
        assert all(torch.equal(after[key], weight) for key, weight in before.items())
        assert max(float((merged[key] - weight).abs().max()) for key, weight in one_merged.items()) <= 5e-6
        assert max(float((trained[key] - factor).abs().max()) for key, factor in one_trained.items()) <= 5e-6
