"""A checkpoint of any layout continues in any other: the same weights, moments and counters, the same next update."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpoints import save_state
from tests.helpers.models.layouts import CP2, DENSE, EP2, MOE, OLMO, ONE_GROUP, PP2, SP, TP2, TP4, VP2
from tests.helpers.models.lora_models import stored_tensors
from tests.helpers.models.tiny_models import VOCAB, join_actor, parse_roles
from tests.helpers.models.updates import batch_of, clipped_loss, forward_of, split_microbatches, whole_weights
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world


def continue_run(rank, flags: str, source, target, value_head: bool, model: str = "llama"):
    """Loads (or not), updates once, saves; returns the whole weights before and after."""
    from megarl.algorithms.aggregation import token_mean
    from megarl.mcore.weights import dist_checkpoint
    from megarl.roles.trainable_model import TrainableModel

    roles = parse_roles(flags, dist.get_world_size(), model)
    _, place = join_actor(flags, model)
    trainable_model = TrainableModel(roles["actor"], place, VOCAB, 1, value_head)
    if source:
        state = trainable_model.state({"count": 0}, loading=True)
        assert trainable_model.restore(dist_checkpoint.load_role(state, source, place.pg_collection)) == {"count": 3}
    before = whole_weights(trainable_model.model, place.pg_collection)
    batch = batch_of(place)
    count = place.dp_all_reduce(batch.response_mask.sum().double())

    def loss(out, part):
        terms = out * part.advantages if value_head else clipped_loss(out, part)
        value = token_mean(terms, part.response_mask, count)
        return value, value.detach().double()

    multiple = dist.get_world_size(place.pg_collection.pp) if len(trainable_model.model) > 1 else 1
    parts = split_microbatches(batch, 2, multiple)
    trainable_model.router_state.attach(batch, parts)
    assert trainable_model.update(parts, forward_of(value_head), loss)[1]
    if rank == 0:
        target.mkdir()
    dist.barrier()
    save_state(trainable_model.state({"count": 3}), target)
    return before, whole_weights(trainable_model.model, place.pg_collection)


DENSE_ROUTE = [
    (1, ""), (4, f"{TP2} {PP2}"), (2, f"{PP2} {VP2}"), (2, CP2), (2, "--use-torch-fsdp2"), (2, f"{TP2} {SP}"), (1, ""),
]  # fmt: skip
DISTRIBUTED_ROUTE = [(2, ""), (4, f"{TP2} {PP2}"), (2, f"{PP2} {VP2}"), (1, "")]
EXPERT_ROUTE = [(1, ""), (2, EP2), (4, f"{TP2} {SP} {EP2}"), (4, f"{PP2} {EP2}"), (1, "")]


def travel(folder, shape: str, route, model: str, tolerance: float):
    """One update in each layout of the route; compares with a run that stays on one rank."""
    stay = here = arrived = None
    for leg, (size, flags) in enumerate(route):
        still, moved = folder / f"stay{leg}", folder / f"move{leg}"
        ((before, expected),) = run_world(continue_run, 1, shape, stay, still, False, model)
        for start, found in run_world(continue_run, size, f"{shape} {flags}", here, moved, False, model):
            assert start.keys() == before.keys()
            assert arrived is None or all(torch.equal(start[key], arrived[key]) for key in start)
            largest = max(float((found[key] - weight).abs().max()) for key, weight in expected.items())
            assert largest <= tolerance * (leg + 1)
        stay, here, arrived = still, moved, found


SGD = "--num-layers 4 --optimizer sgd --lr 0.05 --weight-decay 0.1 --clip-grad 1"
SMALL = "--num-layers 4 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
RATES = "--lr-multipliers *.mlp.*=0.5 *.layers.1.*=2 --weight-decay-multipliers *.linear_qkv.*=0"
FROZEN = f"{DENSE} {RATES} --freeze embedding.* *.layers.2.*"
SHARDED_ROUTE = [(2, "--use-distributed-optimizer"), (2, f"{TP2} --use-distributed-optimizer"), (1, "")]
FROZEN_ROUTE = [(1, ""), (4, f"{TP2} {PP2}"), (2, CP2), (2, f"{TP2} {SP}"), (1, "")]
# Shape, route, model. Some parameters of recurrent models have four elements, so that every bucket of the distributed
# optimizer ends with padding; some are fp32 in models of 16 bits.
SHARDED, BUCKETS = "--use-distributed-optimizer", "--overlap-grad-reduce --ddp-bucket-size 1"
RECURRENT_ROUTE = [(2, f"{TP2} {SP}"), (2, f"{PP2} {VP2}"), (2, EP2), (1, "")]
GROUPS_ROUTE = [(1, ""), (4, f"{TP4} {SP}"), (2, PP2), (4, f"{TP2} {CP2}"), (4, TP4), (1, "")]
MUON = "--num-layers 4 --optimizer muon --lr 0.002 --weight-decay 0.1 --adam-eps 1 --muon-fp32-matmul-prec highest"


def muon(row):
    """A long row that needs the package of Muon."""
    is_absent = importlib.util.find_spec("emerging_optimizers") is None
    reason = "emerging-optimizers is not installed: pip install 'megarl[optimizers]'"
    return pytest.param(*row, marks=[pytest.mark.long, pytest.mark.skipif(is_absent, reason=reason)])


TRAVELS = [
    (DENSE, DENSE_ROUTE[1:5:3], "llama"),
    (DENSE, [(2, f"{SHARDED} {BUCKETS}"), (1, SHARDED)], "recurrent"),
    (f"{MOE} {SHARDED}", EXPERT_ROUTE[1:2], "llama"),
    (f"{SGD} {RATES} --freeze embedding.* *.layers.2.*", [(1, ""), (2, PP2)], "llama"),
    *map(long, [
        *((f"{DENSE} --num-layers 2 --bf16 {more}", [(1, ""), (1, "")], "recurrent") for more in ("", SHARDED)),
        (DENSE, DENSE_ROUTE, "llama"),
        (f"{DENSE} {SHARDED}", DISTRIBUTED_ROUTE, "llama"),
        (MOE, EXPERT_ROUTE, "llama"),
        *((f"{shape} {more}", GROUPS_ROUTE, "llama") for shape in (DENSE, ONE_GROUP, OLMO) for more in ("", SHARDED)),
        (ONE_GROUP, [(4, f"{TP2} --use-torch-fsdp2"), (1, ""), (4, f"{TP4} {SP}")], "llama"),
        (f"{MOE} {SHARDED}", [(2, f"{TP2} {SP}"), (2, EP2), (1, "")], "latent"),
        (f"{MOE} {SHARDED}", RECURRENT_ROUTE, "recurrent"),
        (f"{MOE} --moe-layer-freq 1 --hybrid-layer-pattern ME*M {SHARDED}", RECURRENT_ROUTE, "mamba"),
        *((shape, route, "llama") for shape in (SGD, f"{SGD} --sgd-momentum 0", f"{DENSE} {RATES}")
          for route in (DENSE_ROUTE, SHARDED_ROUTE)),
        *((f"{SMALL} --adam-eps 1 --lr 0.01 {more}", route, "llama") for more, route in (
            ("", DENSE_ROUTE), (SHARDED, DISTRIBUTED_ROUTE), (EXPERTS, EXPERT_ROUTE))),
        *((f"{FROZEN} {more}", FROZEN_ROUTE, "llama") for more in ("", SHARDED)),
        (f"{FROZEN} --use-torch-fsdp2", [(2, ""), (4, TP2), (2, "")], "llama"),
        (f"{SGD} {EXPERTS}", EXPERT_ROUTE, "llama"),
    ]),
    *map(muon, [
        (MUON, [(1, ""), (4, f"{TP2} {PP2}"), (2, f"{PP2} {VP2}"), (2, CP2), (2, f"{TP2} {SP}"), (1, "")], "llama"),
        (f"{MUON} {SHARDED}", [(2, ""), (4, TP2), (2, f"{PP2} {VP2}"), (2, CP2), (3, ""), (1, "")], "llama"),
        (f"{MUON} {RATES} --freeze embedding.* *.layers.2.*", FROZEN_ROUTE, "llama"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("shape, route, model", TRAVELS)
def test_a_checkpoint_continues_in_other_layouts(shape, route, model, tmp_path):
    travel(tmp_path, shape, route, model, 2e-5 if MUON in shape else 2e-6)


@pytest.mark.parametrize("precision", [long(""), "--bf16"])
def test_a_critic_checkpoint_loads_exactly_in_fp32_and_bf16(tmp_path, precision):
    first, second = tmp_path / "first", tmp_path / "second"
    ((_, saved),) = run_world(continue_run, 1, f"{DENSE} {precision}", None, first, True)
    for before, _ in run_world(continue_run, 2, f"{DENSE} {precision} {TP2}", first, second, True):
        assert all(torch.equal(before[key], weight) for key, weight in saved.items())


def train_and_save(rank, flags: str, target, shape: str = "llama", value_head: bool = False):
    """Saves a model after one update, so that its moments are not 0."""
    continue_run(rank, flags, None, target, value_head, shape)


def load_and_save(rank, flags: str, sources, targets, shape: str = "llama", value_head: bool = False):
    """Loads checkpoints, after one update each, one after the other into the same model, and saves each again."""
    from megarl.mcore.weights import dist_checkpoint
    from megarl.roles.trainable_model import TrainableModel

    _, place = join_actor(flags, shape)
    model = TrainableModel(parse_roles(flags, dist.get_world_size(), shape)["actor"], place, VOCAB, 1, value_head)
    for source, target in zip(sources, targets, strict=True):
        state = model.state({"count": 0}, loading=True)
        model.restore(dist_checkpoint.load_role(state, source, place.pg_collection))
        steps = {group["step"] for group in model.optimizer.param_groups if "step" in group}
        assert steps == {1} or "sgd" in flags
        if rank == 0:
            target.mkdir()
        dist.barrier()
        save_state(model.state({"count": 3}), target)


SAVED = [(1, ""), (4, f"{TP2} {PP2}"), (2, CP2), (2, "")]
LOADED = [(2, f"{TP2} {SP}"), (2, f"{PP2} {VP2}"), (4, f"{TP2} {CP2}"), (2, "--use-torch-fsdp2")]


@pytest.mark.parametrize("flags, loaded", [
    long(("", LOADED)), long(("--use-distributed-optimizer", [*LOADED[:3], (4, PP2)])),
])  # fmt: skip
def test_weights_and_moments_of_four_layouts_are_the_same_bits_in_four_others(flags, loaded, tmp_path):
    sources = [tmp_path / f"saved{i}" for i in range(len(SAVED))]
    for source, (size, layout) in zip(sources, SAVED, strict=True):
        run_world(train_and_save, size, f"{DENSE} {flags} {layout}", source)
    expected = [stored_tensors(source) for source in sources]
    assert all(any("exp_avg_sq" in key for key in tensors) for tensors in expected)
    for number, (size, layout) in enumerate(loaded):
        targets = [tmp_path / f"loaded{number}-{i}" for i in range(len(SAVED))]
        run_world(load_and_save, size, f"{DENSE} {flags} {layout}", sources, targets)
        for tensors, target in zip(expected, targets, strict=True):
            found = stored_tensors(target)
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[key], value) for key, value in tensors.items()), (layout, target)


FSDP, FP16 = "--use-torch-fsdp2", "--fp16"
EVERY_KIND = [
    (1, SHARDED), (2, f"--bf16 {FSDP}"), (2, FSDP), (2, f"--bf16 {SHARDED}"), (1, FP16), (2, SHARDED), (1, ""),
]  # fmt: skip
OF_STATES = [
    (2, f"--bf16 {FSDP}"), (2, f"--bf16 {SHARDED}"), (3, f"--bf16 {FSDP}"), (2, FSDP), (4, f"--bf16 {TP2} {FSDP}"),
    (1, "--bf16"), (1, ""),
]  # fmt: skip
HOST = f"{SHARDED} --optimizer-cpu-offload --optimizer-offload-fraction"  # here the host's memory is the device's
HOST_KINDS = [
    (2, f"--bf16 {HOST} 0.5"), (1, f"{HOST} 1"), (2, f"--bf16 {SHARDED} {TP2} {SP}"), (2, f"{HOST} 0.7 {PP2}"),
    (1, ""),
]  # fmt: skip


@pytest.mark.parametrize("shape, model, kinds", [
    (DENSE, "recurrent", [(1, f"--bf16 {SHARDED}"), (2, FSDP), (1, "")]),
    long((DENSE, "recurrent", [(1, f"--bf16 {SHARDED}"), (2, FSDP), (1, "--bf16"), (2, SHARDED), (1, "")])),
    *(long((f"{shape} {more}", "llama", EVERY_KIND)) for shape in (DENSE, MOE) for more in ("", "--lora-rank 2")),
    long((f"{SGD} {RATES}", "llama", EVERY_KIND)),
    *(long((f"{shape} {SMALL}", "llama", EVERY_KIND)) for shape in (DENSE, MOE, f"{DENSE} --lora-rank 2")),
    long((f"{FROZEN} --bf16", "llama", [(1, ""), (2, TP2), (2, PP2), (1, "")])),
    *(long((shape, model, HOST_KINDS)) for shape, model in (
        (DENSE, "recurrent"), (MOE, "llama"), (f"{DENSE} {SMALL}", "llama"))),
    long((f"{FROZEN} --bf16 {SHARDED}", "llama", [(2, f"{HOST} 0.5"), (1, f"{HOST} 1"), (2, TP2), (1, "")])),
    *(long((DENSE, model, OF_STATES)) for model in ("recurrent", "mamba")),
    # A scalar head has one row and one bias, so some ranks hold no part of it.
    (DENSE, "critic", [(2, FSDP), (3, FSDP), (1, "")]),
    *(long((DENSE, model, [(2, FSDP), (3, FSDP), (1, ""), (4, f"{FSDP} {TP2}"), (2, TP2), (4, FSDP), (2, "")]))
      for model in ("llama", "critic")),
    muon((MUON, "llama", [(2, TP2), (2, "--bf16"), (2, PP2), (2, SHARDED), (2, f"--bf16 {SHARDED}"), (1, "")])),
    muon((f"{MUON} {EXPERTS}", "llama", [
        (2, f"{TP2} {SP}"), (2, EP2), (4, f"{TP2} {SP} {EP2} --bf16"), (4, f"{EP2} {SHARDED}"), (1, "")])),
])  # fmt: skip
def test_an_optimizer_of_another_kind_takes_weights_moments_and_steps_to_the_bit(shape, model, kinds, tmp_path):
    """Through all kinds and back: fp32 weights, which those of 16 bits and the distributed one keep as copies. FSDP
    leaves fp32 parameters of a model of 16 bits whole on each rank."""
    (folder, expected), value_head = (tmp_path / "first", {}), model == "critic"
    model = "llama" if value_head else model
    run_world(train_and_save, 1, shape, folder, model, value_head)
    for number, (size, flags) in enumerate(kinds):
        expected = expected or stored_tensors(folder)
        source, folder = folder, tmp_path / str(number)
        run_world(load_and_save, size, f"{shape} {flags}", [source], [folder], model, value_head)
    found = stored_tensors(folder)
    moments = {"sgd": ("momentum_buffer",), "muon": ("momentum_buffer", "exp_avg_sq")}
    kinds_of = next((names for name, names in moments.items() if name in shape), ("exp_avg_sq",))
    assert found.keys() == expected.keys() and all(any(kind in key for key in found) for kind in kinds_of)
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
