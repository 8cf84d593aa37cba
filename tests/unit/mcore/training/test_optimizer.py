"""One update: gradients of plain autograd; frozen parameters, multiples of rates and decays, SGD, Adam with moments of
16 bits against torch's own optimizers; clipping, schedule."""

import fnmatch

import pytest
import torch

from tests.helpers.models.gradient_accumulation import COUNT, accumulate, microbatches_of, wrapped_model
from tests.helpers.models.tiny_models import (
    VOCAB,
    build,
    build_stages,
    gather_parameters,
    join_actor,
    whole_tensor,
)
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FSDP, SHARDED = "--use-torch-fsdp2", "--use-distributed-optimizer"
SGD_LIKE = "--adam-eps 1 --lr 0.05 --clip-grad 0 --weight-decay 0.1"  # no division by tiny second moments


def first_gradients(rank, shape, value_head):
    """(gradients by name, their norm) of an update."""
    from megarl.mcore.training import optimizer

    model, wrapped, adam, _, place = wrapped_model(SGD_LIKE, shape, value_head)
    results = accumulate(wrapped, adam, place, 1, value_head)
    assert results == [len(tokens) for tokens, _, _ in microbatches_of(place, 1)]
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    applied, norm = optimizer.update(adam)
    assert applied
    return gradients, norm


@pytest.mark.parametrize("shape, value_head", [("llama", False), ("gpt2", False), ("llama", True)])
def test_every_parameter_is_trained(shape, value_head):
    """In any layout: tests/distributed/test_layouts.py."""
    gradients, norm = run_world(first_gradients, 1, shape, value_head)[0]
    assert abs(norm - sum(float((g.double() ** 2).sum()) for g in gradients.values()) ** 0.5) <= 1e-5 * norm
    assert [name for name, gradient in gradients.items() if not gradient.abs().max() > 0] == []


def test_gradients_are_those_of_plain_autograd():
    """Gradient buffers and schedule against backward() of the whole loss on the bare model."""

    def compare(rank):
        from megarl.mcore.model.forward_pass import token_scores

        model, wrapped, adam, _, place = wrapped_model(SGD_LIKE)
        bare, *_ = build(SGD_LIKE)
        ((tokens, lengths, weights),) = microbatches_of(place, 1)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), bare.parameters(), strict=True))
        scores = token_scores(bare, tokens, lengths, 0.9, VOCAB)
        ((-(weights * scores.logprobs).sum() - 0.1 * scores.entropy.sum()) / COUNT).backward()
        accumulate(wrapped, adam, place, 2)
        return max(
            float((p.main_grad - q.grad).abs().max() / q.grad.abs().max())
            for p, q in zip(model.parameters(), bare.parameters(), strict=True)
        )

    assert run_world(compare, 1)[0] <= 1e-5


# -- clipping and skipping ---------------------------------------------------------------------------------------


def clipped(rank, flags):
    from megarl.mcore.training import optimizer

    model, wrapped, adam, args, place = wrapped_model(flags)
    accumulate(wrapped, adam, place, 1)
    applied, norm = optimizer.update(adam)
    whole = [whole_tensor(n, p, p.main_grad, place.pg_collection.tp, True) for n, p in model.named_parameters()]
    return applied, norm, sum(float((g.double() ** 2).sum()) for g in whole) ** 0.5


@pytest.mark.parametrize("size, layout", [long((1, "")), (2, TP2), (2, "")])
def test_gradients_are_clipped_to_the_global_norm(size, layout):
    for applied, norm, after in run_world(clipped, size, f"--clip-grad 0.05 {layout}"):
        assert applied and norm > 0.1
        assert abs(after - 0.05) < 1e-5
    for applied, norm, after in run_world(clipped, size, f"--clip-grad 1000 {layout}"):
        assert applied and abs(after - norm) <= 1e-5 * norm


def skipping(rank, flags, bad):
    from megarl.mcore.parallel.fsdp import rows_here
    from megarl.mcore.training import optimizer

    model, wrapped, adam, _, place = wrapped_model(flags)
    before = [rows_here(p).clone() for p in model.parameters()]
    accumulate(wrapped, adam, place, 1)
    if rank == 1:
        rows_here(model.decoder.layers[0].mlp.linear_fc1.weight.main_grad)[0, 0] = bad
    skipped = optimizer.update(adam)
    same = all(torch.equal(rows_here(p), q) for p, q in zip(model.parameters(), before, strict=True))
    accumulate(wrapped, adam, place, 1)
    return skipped[0], same, optimizer.update(adam)[0]


@pytest.mark.parametrize(
    "flags, bad", [(TP2, float("inf")), long((TP2, float("nan"))), (FSDP, float("nan")), long((FSDP, float("inf")))]
)
def test_all_ranks_skip_a_gradient_that_is_not_finite_on_one(flags, bad):
    results = run_world(skipping, 2, flags, bad)
    assert results == [(False, True, True)] * 2


# -- Adam and the schedule ---------------------------------------------------------------------------------------


def rates(rank, flags, updates_per_iteration, updates):
    from megarl.mcore.training import optimizer

    args, _ = join_actor(flags)
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([{"params": [parameter], "lr": 0.0, "max_lr": args.lr, "min_lr": args.min_lr, "lr_mult": 1.0,
                            "wd_mult": 1.0}])  # fmt: skip
    scheduler = optimizer.build_scheduler(sgd, args, updates_per_iteration)
    seen = []
    for _ in range(updates):
        seen.append((sgd.param_groups[0]["lr"], sgd.param_groups[0]["weight_decay"]))
        scheduler.step(1)
    return seen


def test_the_schedule_warms_up_and_decays_in_iterations_of_the_run():
    flags = "--lr 0.01 --min-lr 0.002 --lr-decay-style linear --lr-warmup-iters 2 --train-iters 6 --weight-decay 0.3"
    (seen,) = run_world(rates, 1, flags, 2, 14)
    decay = [0.01 - 0.008 * i / 8 for i in range(9)] + [0.002]
    # The first update is one of the rises, so that it trains.
    assert [rate for rate, _ in seen] == pytest.approx([0.01 * i / 5 for i in range(1, 5)] + decay, rel=1e-6)
    assert {decay for _, decay in seen} == {0.3}
    (seen,) = run_world(rates, 1, f"{flags} --lr-warmup-init 0", 2, 14)  # as Megatron's own training
    assert [rate for rate, _ in seen] == pytest.approx([0.01 * i / 4 for i in range(4)] + decay, rel=1e-6)


def test_the_schedule_is_constant_without_flags():
    (seen,) = run_world(rates, 1, "--lr 0.01 --lr-decay-style constant --train-iters 3", 1, 5)
    assert [rate for rate, _ in seen] == pytest.approx([0.01] * 5)


# -- against torch's optimizers ------------------------------------------------------------------------------------

MULTIPLIERS = "--lr-multipliers *.mlp.*=0.1 *.layers.1.*=3 --weight-decay-multipliers *.linear_qkv.*=0.5 *.mlp.*=0"
SGD = "--optimizer sgd --lr 0.05 --weight-decay 0.2 --clip-grad 0"
ADAM = "--lr 0.01 --weight-decay 0.2 --clip-grad 0 --adam-eps 1"
SMALL_SECOND = f"{ADAM} --adam-beta2 0.95 --use-precision-aware-optimizer --exp-avg-sq-dtype bf16"
SMALL = f"{SMALL_SECOND} --exp-avg-dtype bf16"
FROZEN = ("embedding.*", "*.layers.0.*")
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def wrapped_stages(flags: str, shape: str = "llama"):
    from megarl.mcore.training import optimizer

    stages, args, place = build_stages(flags, shape)
    optimizer.freeze(stages, args, place.pg_collection)
    wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
    built = optimizer.build_optimizer(wrapped, args, place.pg_collection)
    return stages, wrapped, built, args, place


def updates(rank: int, flags: str, shape: str = "llama"):
    """Three updates in this layout: gradients of the first model's weights (without sharding), and weights after."""
    from megarl.mcore.training import optimizer

    (model,), wrapped, built, args, place = wrapped_stages(flags, shape)
    schedule = optimizer.build_scheduler(built, args, 1)
    gradients, rates = [], []
    for _ in range(3):
        schedule.step(0)
        rates.append(schedule.get_lr({}))
        accumulate(wrapped, built, place, 1)
        if not args.use_distributed_optimizer and not args.use_torch_fsdp2:
            gradients.append({name: p.main_grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        assert optimizer.update(built)[0]
        built.zero_grad()
        schedule.step(1)
    if args.use_torch_fsdp2:
        return gradients, rates, {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    return gradients, rates, gather_parameters(model, place.pg_collection.tp, args.swiglu)


def initial(rank: int, flags: str, shape: str = "llama"):
    (model,), *_ = build_stages(flags, shape)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def expected_of_torch(flags: str, kind, **settings) -> dict:
    """The weights after three updates of an optimizer of torch, a group for each parameter."""
    ((gradients, rates, _),), (weights,) = run_world(updates, 1, flags), run_world(initial, 1, flags)
    factors = {"*.mlp.*": 0.1, "*.layers.1.*": 3.0}
    decays = {"*.linear_qkv.*": 0.5, "*.mlp.*": 0.0}

    def factor(table: dict, name: str) -> float:
        found = [value for pattern, value in table.items() if fnmatch.fnmatch(name, pattern)]
        return found[-1] if found and "multipliers" in flags else 1.0

    groups = [
        {"params": [weight.requires_grad_()], "lr_factor": factor(factors, name),
         "weight_decay": 0.2 * factor(decays, name) * (weight.dim() > 1)}
        for name, weight in weights.items()
    ]  # fmt: skip
    optimizer = kind(groups, lr=1.0, **settings)
    for found, rate in zip(gradients, rates, strict=True):
        for (name, weight), group in zip(weights.items(), optimizer.param_groups, strict=True):
            weight.grad, group["lr"] = found[name], rate * group["lr_factor"]
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


class RoundedAdamW(torch.optim.AdamW):
    """torch's, whose moments are rounded to bf16 after each update."""

    rounded = ("exp_avg", "exp_avg_sq")

    def step(self):
        super().step()
        for state in self.state.values():
            state |= {name: state[name].bfloat16().float() for name in self.rounded}


class RoundedSecondAdamW(RoundedAdamW):
    rounded = ("exp_avg_sq",)


SHARDINGS = {"one": (1, ""), "dp2": (2, ""), "tp2": (2, TP2), "sharded": (2, SHARDED), "fsdp": (2, FSDP)}


@pytest.mark.parametrize("layout", by_default(SHARDINGS, ("one", "sharded")))
@pytest.mark.parametrize("more", by_default(
    [f"{SGD} {MULTIPLIERS}", f"{SGD} --sgd-momentum 0", f"{ADAM} {MULTIPLIERS} --lr-warmup-iters 2 --train-iters 5",
     SMALL, SMALL_SECOND],
    [f"{SGD} {MULTIPLIERS}", SMALL],
))  # fmt: skip
def test_updates_equal_torchs(layout, more):
    is_sgd, momentum = "sgd" in more, 0.0 if "--sgd-momentum 0" in more else 0.9
    kind, settings = (torch.optim.SGD, {"momentum": momentum}) if is_sgd else (torch.optim.AdamW, {"eps": 1.0})
    if "bf16" in more:
        kind, settings = RoundedAdamW if more == SMALL else RoundedSecondAdamW, {"eps": 1.0, "betas": (0.9, 0.95)}
    expected = expected_of_torch(more, kind, **settings)
    # A gradient that another layout sums in another order may round a moment to the next number of bf16.
    (before,) = run_world(initial, 1, more)
    moved = max(float((expected[name] - weight).abs().max()) for name, weight in before.items())
    tolerance = 2e-6 + (2**-8 * moved if "bf16" in more else 0.0)
    size, flags = SHARDINGS[layout]
    for _, _, found in run_world(updates, size, f"{more} {flags}"):
        assert found.keys() == expected.keys()
        assert max(float((found[name] - weight).abs().max()) for name, weight in expected.items()) <= tolerance


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FREEZE = f"--freeze {' '.join(FROZEN)}"
FREEZES = {
    "one": (1, f"{ADAM} {FREEZE}", "llama"),
    "recompute": (1, f"{ADAM} {FREEZE} {RECOMPUTE}", "llama"),
    "sharded": (2, f"{ADAM} {FREEZE} {SHARDED}", "llama"),
    "fsdp": (2, f"{ADAM} {FREEZE} {FSDP}", "llama"),
    "tp2-bf16": (2, f"--lr 0.1 {FREEZE} {TP2} --sequence-parallel --bf16 {SHARDED}", "gpt2"),
    "experts": (2, f"{ADAM} {MOE} --freeze *.mlp.experts.* {SHARDED} --expert-model-parallel-size 2", "llama"),
    "sgd": (1, f"{SGD} {FREEZE}", "llama"),
}  # fmt: skip


def frozen_updates(rank: int, flags: str, shape: str):
    """Names of the parameters that three updates leave as they were, and of those that have optimizer states."""
    from megarl.mcore.parallel.fsdp import rows_here
    from megarl.mcore.training import optimizer

    (model,), wrapped, built, args, place = wrapped_stages(flags, shape)
    before = {name: rows_here(p).clone() for name, p in model.named_parameters()}
    optimizer.build_scheduler(built, args, 1).step(0)
    for _ in range(3):
        if args.num_experts:
            for _, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.main_grad.fill_(1.0)
        else:
            accumulate(wrapped, built, place, 1)
        assert optimizer.update(built)[0]
    still = {name for name, p in model.named_parameters() if torch.equal(rows_here(p), before[name])}
    held = sum(len(group["params"]) for part in built.chained_optimizers for group in part.param_groups)
    return still, {name for name, p in model.named_parameters() if p.requires_grad}, held


@pytest.mark.parametrize("case", by_default(FREEZES, ("recompute", "sharded", "experts")))
def test_frozen_parameters_keep_their_bits_and_all_others_change(case):
    size, flags, shape = FREEZES[case]
    patterns = ("*.mlp.experts.*",) if "experts" in flags else FROZEN
    for still, trained, held in run_world(frozen_updates, size, flags, shape):
        frozen = {name for name in still | trained if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
        assert frozen and trained and not frozen & trained
        assert still == frozen
        assert held <= len(trained)


def names_of_patterns(rank: int, flags: str, shape: str, value_head: bool):
    from megarl.mcore.training.optimizer import named
    from megarl.planning.parameters import layout_free_names

    stages, args, place = build_stages(flags, shape, value_head)
    return [{name for name, _ in named(chunk, place.pg_collection)} for chunk in stages], layout_free_names(
        args, value_head
    )


NAMES = [
    (1, "", "llama", False), (1, "", "llama", True), (2, f"{PP2} --num-layers 4", "llama", False),
    (2, f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", "gpt2", False),
    (2, f"{MOE} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 32 --disable-bias-linear", "gpt2",
     False),
    (2, PP2, "mamba", False), (1, "", "recurrent", False), (2, TP2, "latent", False),
]  # fmt: skip


@pytest.mark.parametrize("size, flags, shape, value_head", by_default(NAMES, NAMES[2:5:2]))
def test_names_that_patterns_match_are_those_of_the_model_in_every_layout(size, flags, shape, value_head):
    """Found without a model: by them a pattern is refused before any work starts."""
    found = run_world(names_of_patterns, size, flags, shape, value_head)
    assert set().union(*(names for chunks, _ in found for names in chunks)) == set(found[0][1])
