"""One optimizer update: the same for every split into micro-batches and every layout; Adam, clipping, schedule."""

import functools

import pytest
import torch

from tests.helpers.models.gradient_accumulation import COUNT, accumulate, microbatches_of, wrapped_model
from tests.helpers.models.tiny_models import VOCAB, build, farthest, gather_parameters, join_actor, whole_tensor
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

SGD_LIKE = "--adam-eps 1 --lr 0.05 --clip-grad 0 --weight-decay 0.1"  # no division by tiny second moments


def one_update(rank, flags, shape, parts, value_head):
    """Gradients, gradient norm and updated weights of one update, gathered from the tensor-parallel ranks."""
    from megarl.mcore.training import optimizer

    model, wrapped, adam, args, place = wrapped_model(flags, shape, value_head)
    results = accumulate(wrapped, adam, place, parts, value_head)
    assert results == [len(tokens) for tokens, _, _ in microbatches_of(place, parts)]
    whole = functools.partial(whole_tensor, group=place.pg_collection.tp, gated=args.swiglu)
    if not args.use_distributed_optimizer:
        gradients = {name: whole(name, p, p.main_grad) for name, p in model.named_parameters()}
    else:
        gradients = None  # each replica holds only its shard of the sum
    applied, norm = optimizer.update(adam)
    assert applied
    return gradients, norm, gather_parameters(model, place.pg_collection.tp, args.swiglu)


@functools.cache
def reference_update(shape, value_head):
    return run_world(one_update, 1, SGD_LIKE, shape, 1, value_head)[0]


LAYOUTS = {
    "two micro-batches": (1, "", 2),
    "five micro-batches": (1, "", 5),
    "DP2": (2, "", 1),
    "DP2, three micro-batches": (2, "--overlap-grad-reduce", 3),
    "DP2, distributed optimizer": (2, "--use-distributed-optimizer", 2),
    "TP2": (2, "--tensor-model-parallel-size 2", 1),
    "TP2 DP2": (4, "--tensor-model-parallel-size 2", 2),
    "full recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
}


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("five micro-batches", "DP2, distributed optimizer", "TP2 DP2")))
@pytest.mark.parametrize("shape, value_head", [long(("llama", False)), ("gpt2", False), long(("llama", True))])
def test_an_update_is_the_same_in_every_layout(layout, shape, value_head):
    gradients, norm, weights = reference_update(shape, value_head)
    size, flags, parts = LAYOUTS[layout]
    largest = max(float(g.abs().max()) for g in gradients.values())
    for found, its_norm, updated in run_world(one_update, size, f"{SGD_LIKE} {flags}", shape, parts, value_head):
        assert abs(its_norm - norm) <= 1e-5 * norm
        assert updated.keys() == weights.keys()
        for name, gradient in gradients.items():
            assert found is None or (found[name] - gradient).abs().max() <= 2e-5 * largest, name
            assert farthest(updated[name], weights[name]) <= 1e-5, name


@pytest.mark.parametrize("shape, value_head", [("llama", False), ("gpt2", False), ("llama", True)])
def test_every_parameter_is_trained(shape, value_head):
    gradients, norm, _ = reference_update(shape, value_head)
    assert abs(norm - sum(float((g.double() ** 2).sum()) for g in gradients.values()) ** 0.5) <= 1e-5 * norm
    still = [name for name, gradient in gradients.items() if not gradient.abs().max() > 0]
    assert still == []


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


@pytest.mark.parametrize("size, layout", [(1, ""), (2, "--tensor-model-parallel-size 2"), (2, "")])
def test_gradients_are_clipped_to_the_global_norm(size, layout):
    for applied, norm, after in run_world(clipped, size, f"--clip-grad 0.05 {layout}"):
        assert applied and norm > 0.1
        assert abs(after - 0.05) < 1e-5
    for applied, norm, after in run_world(clipped, size, f"--clip-grad 1000 {layout}"):
        assert applied and abs(after - norm) <= 1e-5 * norm


def skipping(rank, flags, bad):
    from megarl.mcore.training import optimizer

    model, wrapped, adam, _, place = wrapped_model(flags)
    before = [p.detach().clone() for p in model.parameters()]
    accumulate(wrapped, adam, place, 1)
    if rank == 1:
        model.decoder.layers[0].mlp.linear_fc1.weight.main_grad[0, 0] = bad
    skipped = optimizer.update(adam)
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    accumulate(wrapped, adam, place, 1)
    return skipped[0], same, optimizer.update(adam)[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_skip_a_gradient_that_is_not_finite_on_one(bad):
    results = run_world(skipping, 2, "--tensor-model-parallel-size 2", bad)
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
