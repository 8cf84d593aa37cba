"""Updates of a model with every MoE feature in every layout equal those of a single rank."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpoints import save_state
from tests.helpers.models.layouts import CP2, EP2, PP2, RECOMPUTE, SP, TP2, VP2
from tests.helpers.models.tiny_models import VOCAB, join_actor, parse_roles
from tests.helpers.models.updates import batch_of, clipped_loss, split_microbatches, whole_weights
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

# No division by tiny second moments, and steps of about the gradient's size: what differs in it differs in the weights.
STEPS = "--num-layers 4 --adam-eps 1 --lr 1 --weight-decay 0 --clip-grad 0"
EXPERTS = f"{STEPS} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq ([0]+[1]*3)"
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 1.5"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.03"
LOSSES = (
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.5 0.3 --moe-z-loss-coeff 0.1"
)
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate"
FULL = f"{EXPERTS} {GROUPS} {BIAS} {LOSSES} {SHARED}"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe"
GATHER = "--moe-token-dispatcher-type allgather"
LAYOUTS = {
    "one": (1, ""),
    "one-selective": (1, SELECTIVE),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "sharded-dp2": (2, "--use-torch-fsdp2"),
    "ep2-recompute": (2, f"{EP2} {RECOMPUTE}"),
    "tp2-ep2-sp": (2, f"{TP2} {EP2} {SP}"),
    "cp2-ep2": (2, f"{CP2} {EP2}"),
    "cp2-ep2-gather": (2, f"{CP2} {EP2} {GATHER}"),
    "pp2": (2, PP2),
    "pp2-vp2-selective": (2, f"{PP2} {VP2} {SELECTIVE}"),
    "pp2-vp2-ep2": (4, f"{PP2} {VP2} {EP2}"),
}


def critic_model(flags: str, value_head: bool = False):
    """(trainable model, role groups) of the actor; a value head gets random weights, since 0 would stop gradients."""
    from megarl.roles.trainable_model import TrainableModel

    _, place = join_actor(flags)
    trainable_model = TrainableModel(parse_roles(flags, dist.get_world_size())["actor"], place, VOCAB, 1, value_head)
    for chunk in trainable_model.model if value_head else ():
        if chunk.post_process:
            with torch.no_grad():
                chunk.output_layer.weight.copy_(torch.linspace(-0.2, 0.3, 64).unsqueeze(0))
    return trainable_model, place


def step(trainable_model, role_groups, count: int, value_head: bool = False, spoil: float = 0.0):
    """(loss over all replicas, whether applied, gradient norm) of an update in `count` micro-batches."""
    from megarl.mcore.model import forward_pass

    def forward(chunk, part):
        if value_head:
            return forward_pass.token_values(chunk, part.tokens, part.lengths, part.routing)
        return forward_pass.token_scores(chunk, part.tokens, part.lengths, 0.8, VOCAB, part.routing)

    batch = batch_of(role_groups)
    total = role_groups.dp_all_reduce(batch.response_mask.sum().double())

    def loss(out, part):
        terms = out * part.advantages if value_head else clipped_loss(out, part) - 0.1 * out.entropy
        value = (terms * part.response_mask).sum() / total * (1 + spoil)
        return value, value.detach().double()

    parts = split_microbatches(
        batch, count, dist.get_world_size(role_groups.pg_collection.pp) if len(trainable_model.model) > 1 else 1
    )
    trainable_model.router_state.begin_step()
    trainable_model.router_state.attach(batch, parts)
    losses, applied, norm = trainable_model.update(parts, forward, loss)
    counts = torch.stack([(batch.lengths - 1).sum(), (batch.lengths > 1).sum()]).double()  # without last tokens
    counts = role_groups.dp_all_reduce(counts)
    assert all(torch.equal(torch.stack(part.routing.totals), counts) for part, _ in parts)
    return float(role_groups.dp_all_reduce(torch.stack(losses).sum())), applied, norm


def updates(rank, flags: str, count: int, value_head: bool = False):
    """(loss, norm, metrics, whole weights) of the second of two updates, each in `count` micro-batches."""
    trainable_model, place = critic_model(flags, value_head)
    assert step(trainable_model, place, count, value_head)[1]
    loss, applied, norm = step(trainable_model, place, count, value_head)
    assert applied
    return (
        loss,
        norm,
        trainable_model.router_state.metrics("router"),
        whole_weights(trainable_model.model, place.pg_collection),
    )


@functools.cache
def single(value_head: bool = False):
    """Result of `updates` on a single rank with one micro-batch."""
    return run_world(updates, 1, FULL, 1, value_head)[0]


def compare(found, value_head: bool = False):
    """Results of `updates` of every rank, and of a single rank."""
    expected = single(value_head)
    for i in range(3):  # a loss may be the small rest of terms of about 1: it has their rounding
        assert found[i] == pytest.approx(expected[i], rel=2e-5, abs=1e-5)
    compare_weights(found[3], expected[3])


def compare_weights(weights: dict, one_weights: dict):
    """Floats agree within float32 rounding; numbers computed from counts agree to the bit."""
    assert weights.keys() == one_weights.keys()
    for key, weight in one_weights.items():
        if "expert_bias" in key or "expert_share" in key:
            assert torch.equal(weights[key], weight), key
        assert float((weights[key] - weight).abs().max()) <= 1e-5, key  # each loss moves some of them by 1e-2


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("tp2-ep2-sp", "cp2-ep2-gather", "pp2-vp2-selective")))
def test_an_update_does_not_depend_on_the_layout(layout):
    """Nor on micro-batches, some of them blank on some replicas."""
    size, flags = LAYOUTS[layout]
    for found in run_world(updates, size, f"{FULL} {flags}", 7):
        compare(found)


def test_a_moe_critic_does_not_depend_on_the_layout():
    for found in run_world(updates, 2, f"{FULL} {TP2} {EP2} {SP}", 2, True):
        compare(found, True)


# -- what an update leaves ---------------------------------------------------------------------------------------


def balance_of(trainable_model) -> list:
    """Biases, shares and counts of a model's routers."""
    return [
        x.clone() for r in trainable_model.optimizer.routers for x in (r.expert_bias, r.expert_share, r.expert_counts)
    ]


def same(one: list, other: list) -> bool:
    return all(map(torch.equal, one, other))


def skipping(rank):
    trainable_model, place = critic_model(FULL)
    assert step(trainable_model, place, 2)[1]
    before, state = whole_weights(trainable_model.model, place.pg_collection), balance_of(trainable_model)
    assert not step(trainable_model, place, 2, spoil=float("nan") if rank == 1 else 0.0)[1]
    after = whole_weights(trainable_model.model, place.pg_collection)
    assert all(torch.equal(after[key], weight) for key, weight in before.items())
    assert same(balance_of(trainable_model), state)
    assert step(trainable_model, place, 2)[1]
    return whole_weights(trainable_model.model, place.pg_collection)


def test_a_skipped_update_changes_nothing():
    for weights in run_world(skipping, 2):
        compare_weights(weights, single()[3])


def sequences_per_example(rank):
    """Actor and critic of one process, and a frozen model with the actor's flags."""
    from megarl.mcore.model.forward_pass import token_scores
    from megarl.mcore.model.gpt import build_frozen_model

    (actor, place), (critic, _) = critic_model(FULL), critic_model(FULL, value_head=True)
    reference = build_frozen_model(actor.role.megatron, VOCAB, place.pg_collection)
    frozen, idle = whole_weights(reference, place.pg_collection), balance_of(critic)
    step(actor, place, 2)
    token_scores(reference[0], torch.arange(5), torch.tensor([5]), 1.0, VOCAB)
    assert same(balance_of(critic), idle)
    moved = balance_of(actor)
    step(critic, place, 2, value_head=True)
    assert same(balance_of(actor), moved) and not same(balance_of(critic), idle)
    after = whole_weights(reference, place.pg_collection)
    assert all(torch.equal(after[key], weight) for key, weight in frozen.items())


def test_two_models_of_a_process_share_no_expert_state():
    run_world(sequences_per_example, 1)


def half(rank):
    """Kinds of numbers of biases and shares in bf16; gradient norms in fp16 with two loss scales."""
    trainable_model, place = critic_model(f"{FULL} --bf16")
    step(trainable_model, place, 2)
    assert trainable_model.optimizer.routers[0].weight.dtype == torch.bfloat16
    kinds = {x.dtype for router in trainable_model.optimizer.routers for x in (router.expert_bias, router.expert_share)}
    scaled = [critic_model(f"{FULL} --fp16 --initial-loss-scale {scale} --min-loss-scale 1")[0] for scale in (16, 2048)]
    return kinds, [step(trainable_model, place, 2)[2] for trainable_model in scaled]


def test_a_bf16_update_does_not_depend_on_the_layout():
    """A bias of 0.5 in bf16 would not move by 0.001; the loss scale of fp16 is that of auxiliary losses, too."""
    ((kinds, (norm, other)),) = run_world(half, 1)
    assert kinds == {torch.float32} and norm == pytest.approx(other, rel=1e-3)


def transferred(rank):
    from megarl.mcore.model.gpt import build_model
    from megarl.mcore.weights.reshard import WeightTransfer
    from megarl.mcore.weights.reshard_plan import model_weights

    trainable_model, place = critic_model(f"{FULL} {EP2}")
    groups = place.pg_collection
    args, alone = join_actor(FULL)
    other = build_model(args, VOCAB, alone.pg_collection)
    weights = model_weights(trainable_model.model, groups), model_weights(other, alone.pg_collection)
    transfer = WeightTransfer(*weights, groups.intra_dist_opt)
    step(trainable_model, place, 2)
    transfer.run()
    transfer.verify()
    found, expected = whole_weights(other, alone.pg_collection), whole_weights(trainable_model.model, groups)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], x) for key, x in expected.items())
    assert all(router.expert_bias.any() for router in trainable_model.optimizer.routers)


def test_a_rollout_model_gets_expert_biases_and_loads():
    run_world(transferred, 2)


def relay(rank, flags: str, source, target):
    """Loads (or not), updates once, saves; returns the whole weights before and after."""
    from megarl.mcore.weights import dist_checkpoint

    trainable_model, place = critic_model(f"{FULL} {flags}")
    if source:
        trainable_model.restore(
            dist_checkpoint.load_role(trainable_model.state({}, loading=True), source, place.pg_collection)
        )
        trainable_model.scheduler.step(1)
    before = whole_weights(trainable_model.model, place.pg_collection)
    assert step(trainable_model, place, 2)[1]
    if rank == 0:
        target.mkdir()
    dist.barrier()
    save_state(trainable_model.state({}), target)
    return before, whole_weights(trainable_model.model, place.pg_collection)


def test_expert_biases_and_loads_resume_in_another_layout(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    ((_, saved),) = run_world(relay, 1, "", None, first)
    for before, after in run_world(relay, 2, f"{TP2} {EP2} {SP}", first, second):
        assert before.keys() == saved.keys() and all(torch.equal(before[key], x) for key, x in saved.items())
        compare_weights(after, single()[3])
