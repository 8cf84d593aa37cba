"""Adam with moments of 16 bits and with states on the host: the updates of torch, memory, and loading."""

import copy

import pytest
import torch

from megarl.mcore.config.optimizer_flags import MAX_BETA_BF16
from tests.helpers.models.trainable_models import DISTRIBUTED, MOE, critic_model, loss_of_values
from tests.helpers.models.updates import batch_of, forward_of, split_microbatches
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
SHAPES = [(64, 16), (16,), (), (0, 16), (3, 16, 2), (160,)]
BF16, FP32 = torch.bfloat16, torch.float32


def small(parameters, first=BF16, second=BF16, **more):
    from megarl.mcore.training.adam import Adam

    moments = {"exp_avg": first, "exp_avg_sq": second} if first else None
    return Adam(parameters, **SETTINGS | more, moments=moments)


def parameters(generator=None) -> list:
    generator = generator or torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


@pytest.mark.parametrize("piece", [2**24, 48])  # elements: all at once; rows, and parts of the vector of 160
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("first, second", [(BF16, BF16), (BF16, FP32), (FP32, BF16), (None, None)])
def test_an_update_is_torchs_with_rounded_moments(first, second, decoupled, piece, monkeypatch):
    from megarl.mcore.training import adam

    monkeypatch.setattr(adam, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    ours = parameters(generator)
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    one = small(ours, first, second, adam_w_mode=decoupled)
    other = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **SETTINGS, fused=True)
    for step in range(5):
        for p, q in list(zip(ours, theirs, strict=True))[1:]:  # the first has no gradient
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        one.step()
        other.step()
        for rates in (one, other):
            rates.param_groups[0]["lr"] *= 0.9
        assert one.param_groups[0]["step"] == step + 1 and torch.equal(ours[0], theirs[0])
        for p, q in list(zip(ours, theirs, strict=True))[1:]:
            for name, dtype in (("exp_avg", first or FP32), ("exp_avg_sq", second or FP32)):
                other.state[q][name] = other.state[q][name].to(dtype).float()
                assert one.state[p][name].dtype == dtype
                assert torch.equal(one.state[p][name].float(), other.state[q][name])
            assert torch.equal(p, q)


def test_a_piece_has_a_bounded_size_and_every_element_is_in_one(monkeypatch):
    from megarl.mcore.training import adam

    monkeypatch.setattr(adam, "PIECE", 48)
    columns = [[torch.arange(p.numel()).view(p.shape) + 1000 * i for i, p in enumerate(parameters())] for _ in range(2)]
    pieces = list(adam.pieces(zip(*columns, strict=True)))
    assert len(pieces) > 20 and all(sum(t.numel() for t in first) <= 48 for first, _ in pieces)
    assert all(torch.equal(a, b) for first, second in pieces for a, b in zip(first, second, strict=True))
    found = torch.cat([t.flatten() for first, _ in pieces for t in first])
    assert torch.equal(found, torch.cat([t.flatten() for t in columns[0]]))


@pytest.mark.parametrize("source", ["small", "fp32"])
def test_loaded_moments_have_their_types(source):
    """torch gives a loaded state the type of its parameter. Moments of fp32 are rounded."""
    before, after = parameters(), parameters()
    saved = small(before) if source == "small" else small(before, FP32, FP32)
    for p in before:
        p.grad = torch.full_like(p, 0.3)
    saved.step()
    loaded = small(after)
    loaded.create_all_moments()
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for p, q in zip(before, after, strict=True):
        for name, moment in loaded.state[q].items():
            assert moment.dtype == BF16
            assert torch.equal(moment, saved.state[p][name].to(BF16))


@pytest.mark.parametrize("beta, falls", [(0.999, False), (MAX_BETA_BF16, True)])
def test_a_moment_of_bf16_falls_with_the_allowed_betas_alone(beta, falls):
    """Why larger ones are refused: a second moment that once was large would stay so, without gradients, too."""
    weight = torch.zeros(128).requires_grad_()
    adam = small([weight], betas=(0.9, beta))
    adam.create_all_moments()
    adam.state[weight]["exp_avg_sq"].copy_(1 + torch.arange(128) / 128)  # all mantissas
    before = adam.state[weight]["exp_avg_sq"].clone()
    weight.grad = torch.zeros(128)
    adam.step()
    assert bool((adam.state[weight]["exp_avg_sq"] < before).all()) == falls
    assert falls or torch.equal(adam.state[weight]["exp_avg_sq"], before)


SIZES = (300, 7, 1000, 64)
MOMENTS = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def groups_of(weights: list) -> list[dict]:
    return [{"params": weights[::2], "lr": 0.02, "weight_decay": 0.1},
            {"params": weights[1::2], "lr": 0.5, "weight_decay": 0.0}]  # fmt: skip


def mixed(decoupled: bool = True):
    """(model's weights, an Adam of two groups whose first two parameters are on the host), the first of bf16."""
    from megarl.mcore.training.adam import HostAdam

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in SIZES]
    weights[0] = weights[0].bfloat16()
    mains = [weights[0].float().requires_grad_(), *(weight.requires_grad_() for weight in weights[1:])]
    adam = HostAdam(
        groups_of(mains), 1.0, 0.0, (0.8, 0.95), 1e-6, decoupled, moments=MOMENTS, overlaps=decoupled, pins=decoupled
    )
    adam.move_to_host({mains[0]: weights[0], mains[1]: mains[1]})
    adam.create_all_moments()
    return weights, mains, adam


def update(mains, adam, others=(), other=None, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    for number, main in enumerate(mains):
        main.grad = torch.randn(SIZES[number], generator=generator)
        for theirs in others[number : number + 1]:
            theirs.grad = main.grad.clone()
    adam.step()
    if other is not None:
        other.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_updates_are_torchs_and_the_device_has_no_states_of_the_host(decoupled):
    weights, mains, adam = mixed(decoupled)
    theirs = [weight.detach().float().clone().requires_grad_() for weight in weights]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    other = kind(groups_of(theirs), betas=(0.8, 0.95), eps=1e-6, fused=True)
    for seed in range(3):
        update(mains, adam, theirs, other, seed)
    assert torch.equal(weights[0], theirs[0].bfloat16()) and torch.equal(adam.on_host[mains[0]].main, theirs[0])
    assert all(torch.equal(ours, expected) for ours, expected in zip(weights[1:], theirs[1:], strict=True))
    for main, expected in zip(mains, theirs, strict=True):
        assert all(torch.equal(adam.state[main][name], other.state[expected][name]) for name in MOMENTS)
    assert mains[0].untyped_storage().nbytes() == 0 and mains[1].untyped_storage().nbytes() > 0
    assert adam.host_bytes == (SIZES[0] + SIZES[1]) * (4 + 4 + 8)


def test_loaded_states_continue_to_the_bit():
    weights, mains, adam = mixed()
    update(mains, adam)
    saved = copy.deepcopy(adam.state_dict())
    others, their_mains, other = mixed()
    update(their_mains, other, seed=9)
    other.load_state_dict(saved)
    for main, theirs in zip(mains, their_mains, strict=True):
        assert all(torch.equal(adam.state[main][name], other.state[theirs][name]) for name in MOMENTS)
        with torch.no_grad():
            if main in adam.on_host:
                other.on_host[theirs].main.copy_(adam.on_host[main].main)
            else:
                theirs.copy_(main)
    update(mains, adam, seed=2)
    update(their_mains, other, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def update_model(trainable_model) -> float:
    """Two updates with other weights in between, as a warm start has them; the gradient's norm."""
    batch = batch_of(trainable_model.role_groups)
    parts = split_microbatches(batch, 2, 1)
    for _ in range(2):
        trainable_model.router_state.attach(batch, parts)
        _, applied, norm = trainable_model.update(parts, forward_of(True), loss_of_values)
        assert applied
        with torch.no_grad(), trainable_model.offload.present("weights", "optimizer", changed=True):
            for parameter in trainable_model.model.parameters():
                parameter.add_(1)
            trainable_model.optimizer.reload_model_params()
    return norm


def with_and_without(rank: int, flags: str, more: str, offload: bool):
    """Whether weights and norms are the same; bytes of the device's fp32 weights and moments of both."""
    found = []
    for own in (flags, f"{flags} --optimizer-cpu-offload {more}"):
        model = critic_model(f"{DISTRIBUTED} {own}", offload)
        norm = update_model(model)
        states = 0
        for part in model.optimizer.chained_optimizers:
            hosts = getattr(part.optimizer, "on_host", ())
            own_states = [part.optimizer.state[p] for g in part.param_groups for p in g["params"] if p not in hosts]
            states += sum(tensor.numel() for state in own_states for tensor in state.values())
        with model.offload.present("weights"):
            found.append((norm, [p.detach().clone() for p in model.model.parameters()], states))
    (norm, weights, states), (other, others, fewer) = found
    return norm == other and all(map(torch.equal, weights, others)), fewer / states


@pytest.mark.parametrize("size, flags, more, offload", [
    (1, "--bf16", "--optimizer-offload-fraction 0.5", False),
    *(long((size, flags, f"--optimizer-offload-fraction {fraction} {more}", offload)) for size, flags, offload in (
        (1, "", True), (2, "--bf16 --overlap-grad-reduce --ddp-bucket-size 3000", False), (2, f"--bf16 {MOE}", True),
        (2, f"{MOE} --expert-model-parallel-size 2", False), (1, "--bf16 --freeze *.layers.0.*", False))
      for fraction, more in ((0.5, "--overlap-cpu-optimizer-d2h-h2d"), (1, "--no-pin-cpu-grads"))),
])  # fmt: skip
def test_a_model_has_the_same_bits_and_its_host_the_fraction(size, flags, more, offload):
    """Also after weights were loaded, of which the host gets its copies anew."""
    fraction = float(more.split()[1])
    for is_same, left in run_world(with_and_without, size, flags, more, offload):
        assert is_same and 1 - fraction <= left <= 1.1 - fraction


def states_to_save(rank: int, flags: str):
    """This rank's states for a checkpoint, as megarl's optimizer collects them and as Megatron's does."""
    from megatron.core.optimizer import distrib_optimizer

    from megarl.mcore.weights.optimizer_states import described

    model, found = critic_model(f"{DISTRIBUTED} {flags}", False), []
    update_model(model)
    megatrons = distrib_optimizer.DistributedOptimizer.get_parameter_state_dp_zero
    with described(model.optimizer):
        for part in model.optimizer.chained_optimizers:
            for collect in (type(part).get_parameter_state_dp_zero, megatrons):
                state = collect(part, use_gloo_comm=False, return_on_all_ranks=True)
                found.append([(name, tensor) for buffer in state.values() if isinstance(buffer, dict)
                              for by_name in buffer.values() for name, tensor in by_name.items()])  # fmt: skip
    return found[::2], found[1::2]


@pytest.mark.parametrize("size, flags", [
    (1, "--bf16 --optimizer-cpu-offload --overlap-grad-reduce --ddp-bucket-size 3000"), long((1, MOE)),
    long((2, f"{MOE} --bf16 --optimizer-cpu-offload --expert-model-parallel-size 2")), long((2, "--bf16")),
])  # fmt: skip
def test_one_rank_collects_the_states_that_megatron_gathers(size, flags):
    for ours, megatrons in run_world(states_to_save, size, flags):
        assert len(ours) == len(megatrons) > 0
        for found, wanted in zip(ours, megatrons, strict=True):
            assert [name for name, _ in found] == [name for name, _ in wanted] and len(found) >= 4
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b))
                       for (_, a), (_, b) in zip(found, wanted, strict=True))  # fmt: skip
            assert any(torch.as_tensor(tensor).any() for name, tensor in found if name == "exp_avg_sq")
