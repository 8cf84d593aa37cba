"""One PPO update of actor and critic in every parallel layout: the losses, norms and weights of a single rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.helpers.models.layouts import CP2, DENSE, EP2, LATENT_LAYOUTS, LAYOUTS, MOE, PP2, RECURRENT_LAYOUTS, SP, TP2
from tests.helpers.models.tiny_models import VOCAB, build, join_actor, parse_roles, ragged_tokens, whole_tensor
from tests.helpers.models.updates import batch_of, clipped_loss, forward_of, split_microbatches, whole_weights
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world


def update(rank, flags: str, parts: int, value_head: bool, shape: str = "llama"):
    """(loss, gradient norm, sum of squared scores, whole weights before and after) of an update; equal on all ranks."""
    from megarl.algorithms.advantages import clipped_value_loss
    from megarl.algorithms.aggregation import token_mean
    from megarl.roles.trainable_model import TrainableModel

    roles = parse_roles(flags, dist.get_world_size(), shape)
    args, place = join_actor(flags, shape)
    trainable_model = TrainableModel(roles["actor"], place, VOCAB, 1, value_head)
    with torch.no_grad():
        for chunk in trainable_model.model:
            if value_head and chunk.post_process:  # a head of zeros would stop gradients
                weight, drawn = chunk.output_layer.weight, torch.linspace(-0.2, 0.3, 64).unsqueeze(0)
                if args.use_torch_fsdp2:
                    drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
                weight.copy_(drawn)
    before = whole_weights(trainable_model.model, place.pg_collection)
    batch = batch_of(place)
    count = place.dp_all_reduce(batch.response_mask.sum().double())

    def loss(out, part):
        if value_head:
            terms, _ = clipped_value_loss(out, part.values, part.returns, 0.2)
        else:
            terms = clipped_loss(out, part) - 0.1 * out.entropy
        value = token_mean(terms, part.response_mask, count)
        return value, value.detach().double()

    multiple = dist.get_world_size(place.pg_collection.pp) if len(trainable_model.model) > 1 else 1
    parts = split_microbatches(batch, parts, multiple)
    trainable_model.router_state.attach(batch, parts)
    scores = [out for out, places in trainable_model.forward_only(parts, forward_of(value_head)) if len(places)]
    trainable_model.router_state.attach(batch, parts)
    losses, applied, norm = trainable_model.update(parts, forward_of(value_head), loss)
    assert applied
    total = place.dp_all_reduce(torch.stack(losses).sum())
    flat = scores if value_head else [s.logprobs for s in scores]
    checked = place.dp_all_reduce(sum(s.double().square().sum() for s in flat))
    return float(total), norm, float(checked), before, whole_weights(trainable_model.model, place.pg_collection)


def updates(rank, flags: str, splits: tuple[int, ...]) -> dict:
    """Results of `update` for actor and critic and each number of micro-batches."""
    return {(parts, head): update(rank, flags, parts, head) for parts in splits for head in (False, True)}


@functools.cache
def single(flags: str) -> dict:
    return run_world(updates, 1, flags, (1,))[0]


# By default one layout for each dimension and kind of model, in two micro-batches.
CHOSEN = ("pp2-vp2", "cp2", "dp2-overlap", "sharded-dp2", "tp2-sp-gemma")  # experts: test_moe_layouts.py


@pytest.mark.parametrize(
    "layout, splits", [*((layout, (2,)) for layout in CHOSEN), *(long((layout, (1, 2, 5))) for layout in LAYOUTS)]
)
def test_an_update_does_not_depend_on_the_layout(layout, splits):
    size, shape, flags = LAYOUTS[layout]
    for found in run_world(updates, size, f"{shape} {flags}", splits):
        for (_, head), result in found.items():
            check_update(result, single(shape)[1, head])


def check_update(result, expected):
    loss, norm, checked, before, after = result
    one_loss, one_norm, one_checked, one_before, one_after = expected
    assert before.keys() == one_before.keys()
    assert all(torch.equal(before[key], weight) for key, weight in one_before.items())
    assert checked == pytest.approx(one_checked, rel=1e-5)
    assert loss == pytest.approx(one_loss, rel=1e-5, abs=2e-6)  # a mean of terms of about 1
    assert norm == pytest.approx(one_norm, rel=1e-5)
    assert max(float((after[key] - weight).abs().max()) for key, weight in one_after.items()) <= 1e-6


def test_experts_with_biases_learn_the_same_in_every_layout():
    """Router, experts and attention with biases, a clamped gate, sinks; the gpt2 shape has biases."""
    flags = f"{MOE} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 1.5 --softmax-type learnable"
    (expected,) = run_world(update, 1, flags, 1, False, "gpt2")
    biases = [key for key in expected[3] if key.endswith("experts.linear_fc2.bias")]
    assert biases and all((expected[4][key] != expected[3][key]).any() for key in biases)
    for layout in (EP2, f"{TP2} {SP} {EP2}", PP2):
        for result in run_world(update, 2, f"{flags} {layout}", 1, False, "gpt2"):
            check_update(result, expected)


@functools.cache
def single_of(shape: str, flags: str) -> tuple:
    return run_world(update, 1, flags, 1, False, shape)[0]


HYBRID_MOE = f"{MOE} --moe-layer-freq 1 --hybrid-layer-pattern ME*M --moe-latent-size 40"
CHANNEL_LAYOUTS = {name: layout for name, layout in RECURRENT_LAYOUTS.items() if name != "tp2-one-group"}
MAMBA_LAYOUTS = {
    name: (size, shape.replace(MOE, HYBRID_MOE), flags)
    for name, (size, shape, flags) in RECURRENT_LAYOUTS.items()
    if name != "tp2-one-group"
}
# Model -> layouts, and parameters that must move: latents and norms are whole on every tensor-parallel rank; heads and
# groups of recurrent layers are split, and with them all parameters of theirs.
MODELS = {
    "latent": (LATENT_LAYOUTS, "_down_proj kv_layernorm"),
    "recurrent": (RECURRENT_LAYOUTS, "out_norm.weight conv1d.weight.key in_proj.weight.z linear_qkv.weight"),
    "kimi": (CHANNEL_LAYOUTS, "latent_proj z_proj alpha_proj.weight dt_bias in_proj.weight.beta kv_up_proj"),
    "mamba": (MAMBA_LAYOUTS,
              "norm.weight conv1d.weight.B conv1d.bias.C in_proj.weight.dt linear_qkv.weight fc1.weight"),
}  # fmt: skip
OF_MODELS = [("latent", "tp2-sp"), ("recurrent", "sharded-cp2"), ("kimi", "tp2-sp"), ("mamba", "tp2-sp")]


@pytest.mark.parametrize(
    "model, layout", by_default([(model, layout) for model in MODELS for layout in MODELS[model][0]], OF_MODELS)
)
def test_other_models_learn_the_same_in_every_layout(model, layout):
    layouts, names = MODELS[model]
    size, shape, flags = layouts[layout]
    for result in run_world(update, size, f"{shape} {flags}", 2, False, model):
        check_update(result, single_of(model, shape))
    before, after = single_of(model, shape)[3:]
    for name in names.split():
        own = [key for key in before if name in key]
        assert own and all((after[key] != before[key]).any() for key in own), name


OF_16_BITS = {"dp2": (2, ""), "tp2-sp": (4, f"{TP2} {SP}"), "cp2": (2, CP2), "dp3": (3, "--clip-grad 0.2")}


@pytest.mark.parametrize("shape", by_default(["recurrent", "mamba"], ["mamba"]))
@pytest.mark.parametrize("layout", by_default(OF_16_BITS, ["dp2"]))
def test_sharded_recurrent_layers_of_16_bits_learn_as_whole_ones(layout, shape):
    """To the bit: decays are fp32 and whole on each rank; only the norm's sum has another order."""
    size, flags = OF_16_BITS[layout]
    flags = f"{DENSE} --bf16 {flags}"
    expected = run_world(update, size, flags, 2, False, shape)
    for result, one in zip(
        run_world(update, size, f"{flags} --use-torch-fsdp2", 2, False, shape), expected, strict=True
    ):
        assert result[0] == one[0] and result[2] == one[2] and result[1] == pytest.approx(one[1], rel=1e-6)
        for found, weights in zip(result[3:], one[3:], strict=True):
            assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in weights)
    before, after = expected[0][3:]
    assert any((after[key] != before[key]).any() for key in before if key.endswith("dt_bias"))


def small_gradients(rank, flags: str) -> dict:
    """Gradients of the vectors of a layer with recurrent states, whole, of the policy's log-probs and entropies."""
    from megarl.mcore.model.forward_pass import token_scores

    model, _, place = build(flags, "recurrent")
    tokens, lengths = ragged_tokens([1, 2, 70, 11])
    scores = token_scores(model, tokens, lengths, 1.0, VOCAB)
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1))
    (weights * (scores.logprobs + scores.entropy)).sum().backward()
    return {
        name: whole_tensor(name, parameter, parameter.grad, place.pg_collection.tp, True)
        for name, parameter in model.named_parameters()
        if name.endswith(("A_log", "dt_bias", "out_norm.weight"))
    }


def test_small_gradients_of_recurrent_states_do_not_depend_on_the_layout():
    """They are too small to show in an update: a rank has some heads, and all share the norm's weights."""
    (expected,) = run_world(small_gradients, 1, "")
    for flags in (TP2, f"{TP2} {SP}"):
        for found in run_world(small_gradients, 2, flags):
            assert found.keys() == expected.keys() and len(found) == 3
            for name, gradient in found.items():
                assert float((gradient - expected[name]).abs().max()) <= 2e-5 * float(expected[name].abs().max()), name
