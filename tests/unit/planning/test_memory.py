"""Memory of the plan against real models: parameters, gradients and optimizer states exactly, activations nearly."""

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.model import weight_table
from megarl.planning import memory, parameters
from tests.helpers.models.planned_memory import build, check_weights, join_actor, real_bytes
from tests.helpers.models.tiny_models import VOCAB, parse_roles, ragged_tokens
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

MOE = "--num-experts 4 --moe-ffn-hidden-size 36 --moe-router-topk 2"
DENSE_FIRST = f"{MOE} --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 50"
TP2, PP2, EP2 = (f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
SP2, CP2, DISTRIBUTED = f"{TP2} --sequence-parallel", "--context-parallel-size 2", "--use-distributed-optimizer"
VPP = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
SMALL_SECOND = "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
SMALL_MOMENTS = f"{SMALL_SECOND} --exp-avg-dtype bf16"
SHARDED = "--use-torch-fsdp2 --untie-embeddings-and-output-weights"
LENGTHS = [40, 40, 32, 48, 1, 47, 48]

# Flags, shape, value head, ranks.
MODELS = [
    ("", "llama", False, 1), ("--untie-embeddings-and-output-weights --qk-layernorm", "llama", False, 1),
    ("", "llama", True, 1), ("--bf16", "llama", True, 2), ("", "gpt2", False, 1), ("--add-qkv-bias", "gpt2", True, 1),
    (f"{MOE} --disable-bias-linear", "gpt2", False, 2), (f"{MOE} --bf16", "llama", False, 1),
    (f"{DENSE_FIRST} --moe-shared-expert-gate", "llama", False, 1), (f"{DENSE_FIRST} {EP2}", "llama", False, 4),
    (TP2, "llama", False, 2), (f"{TP2} --bf16", "llama", True, 4), (PP2, "llama", False, 4),
    (f"{PP2} {TP2}", "gpt2", False, 4), (f"{VPP} --bf16", "llama", False, 4), (CP2, "llama", False, 4),
    (f"{MOE} {SP2} {EP2} --qk-layernorm", "llama", False, 8), (f"{DENSE_FIRST} {SP2} {EP2} {PP2}", "llama", False, 8),
    (f"{MOE} {EP2} --expert-tensor-parallel-size 2", "llama", False, 8),
    (f"{MOE} --num-experts 8 {SP2} --expert-model-parallel-size 4 {CP2}", "llama", False, 8),
    (f"{MOE} --tensor-model-parallel-size 4 --num-query-groups 4 --sequence-parallel {EP2}", "llama", False, 8),
    (f"{TP2} --layernorm-position post --qk-layernorm-all-heads", "llama", False, 2),
    ("--layernorm-position sandwich --geglu --disable-bias-linear", "gpt2", False, 1),
    ("--num-layers 3 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", "llama", False, 2),
    ("--num-layers 4 --bf16", "recurrent", False, 2), (f"{TP2} {PP2}", "recurrent", True, 4),
    (f"{TP2} {PP2}", "kimi", False, 4), (f"{TP2} --bf16", "ling", True, 2),
    (f"{TP2} {PP2} --bf16", "mamba", True, 4), (f"{MOE} --hybrid-layer-pattern ME*M", "mamba", False, 1),
    (f"{MOE} --hybrid-layer-pattern ME*M --moe-latent-size 40 {SP2} {EP2}", "mamba", False, 4),
    ("", "latent", True, 1), (f"{TP2} --bf16", "latent", False, 2),
    (f"{DENSE_FIRST} {SP2} {EP2} {PP2}", "latent", False, 8),
    (f"{TP2} --layernorm-position post --qk-layernorm-all-heads --num-query-groups 1", "llama", False, 2),
    ("--tensor-model-parallel-size 4 --qk-layernorm", "llama", False, 4),
    ("--optimizer sgd --bf16", "llama", False, 2), ("--optimizer sgd --sgd-momentum 0", "llama", False, 1),
    (f"{SMALL_MOMENTS} --bf16", "llama", False, 2), (f"{SMALL_SECOND} {TP2}", "gpt2", False, 2),
]  # fmt: skip


MUON_MODELS = [
    ("", "llama", True, 1), (f"{TP2} --bf16", "gpt2", False, 4), ("", "recurrent", False, 1), ("", "mamba", False, 3),
    ("", "gpt2", True, 2),
    (f"{DENSE_FIRST} {SP2} {EP2} {PP2} --moe-shared-expert-gate", "latent", False, 8),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("emerging_optimizers") is None, reason="needs megarl[optimizers]")
@pytest.mark.parametrize("more", ["", DISTRIBUTED])
@pytest.mark.parametrize("flags, shape, value_head, ranks", MUON_MODELS)
def test_states_of_muon_are_exact_on_every_rank(flags, shape, value_head, ranks, more):
    from megarl.mcore.parallel.process_groups import fake_world

    for rank in range(ranks):
        with fake_world(ranks, rank):
            args, pg_collection, *built = build(f"{flags} --optimizer muon {more}", shape, value_head)
            assert check_weights(args, pg_collection, built[0], value_head, rank, ranks) == real_bytes(*built)


@pytest.mark.parametrize("flags, shape, value_head, ranks", by_default(MODELS, MODELS[3::5]))
def test_weights_gradients_and_states_are_exact_on_every_rank(flags, shape, value_head, ranks):
    from megarl.mcore.parallel.process_groups import fake_world

    for rank in range(ranks):
        for more in ("", DISTRIBUTED, f"{DISTRIBUTED} --overlap-grad-reduce --ddp-bucket-size 5000"):
            with fake_world(ranks, rank):
                args, pg_collection, *built = build(f"{flags} {more}", shape, value_head)
                planned = check_weights(args, pg_collection, built[0], value_head, rank, ranks)
                assert planned == real_bytes(*built), (rank, more)


PREDICTIONS = [("", "llama", 1), (f"{DENSE_FIRST} {SP2} {EP2} --bf16", "latent", 4), (f"{TP2} --bf16", "recurrent", 2)]


@pytest.mark.parametrize("flags, shape, ranks", by_default(PREDICTIONS, PREDICTIONS[:1]))
@pytest.mark.parametrize("more", ["", DISTRIBUTED])
def test_a_layer_of_multi_token_prediction_is_exact_on_every_rank(flags, shape, ranks, more):
    from megarl.mcore.model.prediction_layer import PredictionLayer
    from megarl.mcore.parallel.process_groups import fake_world
    from megarl.mcore.training import optimizer

    for rank in range(ranks):
        with fake_world(ranks, rank):
            args, place = join_actor(f"{flags} {more}", shape)
            args.predicts = args.trains_prediction = True
            layer = PredictionLayer(args, place.pg_collection)
            wrapped = optimizer.wrap_for_training([layer], args, place.pg_collection)
            real = real_bytes(layer, wrapped, optimizer.build_optimizer(wrapped, args, place.pg_collection))
            planned = weight_table.prediction_weights(args, parallel_sizes(args))
            of_model = [(n, tuple(p.shape), p.element_size()) for n, p in layer.named_parameters()]
            assert [w[:3] for w in planned] == of_model
            weights, gradients, states = memory.trained_bytes(planned, args, False)
            assert (weights, gradients, int(states[rank * len(states) // ranks])) == real


@pytest.mark.parametrize("flags, shape, value_head, ranks", by_default(MODELS, MODELS[1::4]))
def test_totals_count_each_weight_once(flags, shape, value_head, ranks):
    from megarl.mcore.model import gpt
    from megarl.mcore.parallel.process_groups import fake_world

    parts = [part.strip() for part in flags.split("--") if part]
    alone = " ".join(f"--{part}" for part in parts if "parallel" not in part and "pipeline" not in part)
    with fake_world(1):
        args, place = join_actor(alone, shape)
        stages = gpt.build_model(args, VOCAB, place.pg_collection, value_head)
        real = {name: p.numel() for name, p in stages[0].named_parameters()}
    held = []
    for rank in range(ranks):
        with fake_world(ranks, rank):
            args, place = join_actor(flags, shape)
            counted = parameters.parameter_totals(args, VOCAB, value_head)
            stages = gpt.build_model(args, VOCAB, place.pg_collection, value_head)
            held.append(sum(p.numel() for p in stages.parameters()))
    assert counted.total == sum(real.values())
    routed = sum(count for name, count in real.items() if "local_experts" in name)
    idle = routed * (args.num_experts - 2) // args.num_experts if routed else 0
    assert counted.active == counted.total - idle
    assert counted.largest_rank == max(held)


def local(tensor):
    """This rank's rows of a sharded tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def sharded_step(rank: int, cases: list[tuple[str, str]]) -> list:
    """(real, planned) bytes of weights, gradients and states of a sharded role; of the first rank, which has most."""
    from megarl.mcore.model import forward_pass
    from megarl.mcore.parallel import pipeline

    found = []
    for text, shape in cases:
        args, pg_collection, stages, wrapped, optimizer = build(f"{SHARDED} {text}", shape, False)
        pipeline.run_microbatches(
            wrapped, [ragged_tokens(LENGTHS)], lambda chunk, part: forward_pass.token_scores(chunk, *part, 1.0, VOCAB),
            lambda out, part: (out.logprobs.sum(), torch.zeros(1)), pg_collection, train=True,
        )  # fmt: skip
        weights = [local(p) for p in stages.parameters()]
        own, states = {p.untyped_storage().data_ptr() for p in weights}, 0
        for part in optimizer.chained_optimizers:
            held = [local(p) for group in part.optimizer.param_groups for p in group["params"]]
            states += sum(p.nbytes for p in held if p.untyped_storage().data_ptr() not in own)
            states += sum(local(t).nbytes for state in part.optimizer.state.values() for t in state.values())
        real = [sum(p.nbytes for p in weights), sum(local(p.grad).nbytes for p in stages.parameters()), states]
        planned = memory.trained_bytes(parameters.stage_weights(args, VOCAB, False)[0][0], args, True)
        found.append((real, [*planned[:2], int(planned[2][0])]))
    return found


@pytest.mark.parametrize("flags", [MOE, f"--bf16 {DISTRIBUTED}"])
def test_offload_leaves_the_planned_bytes_on_device_and_host(flags):
    from megarl.mcore import offload
    from megarl.mcore.parallel.process_groups import fake_world

    with fake_world(1):
        role = replace(parse_roles(flags, 1)["actor"], name="critic", model_role="critic", offload=True)
        args, _, *built = build(flags, "llama", True)
        moved = offload.offload_trainable(*built)
    (critic,) = memory.stage_memory(role, VOCAB, "value", sum(LENGTHS), 1, 0)
    tensors = sum(len(block.layouts) for kind in moved.blocks.values() for block in kind if hasattr(block, "layouts"))
    assert critic.resident == 0 and 0 <= moved.bytes - critic.host < 64 * tensors  # each ends at 64 bytes
    gone = critic.weights + critic.gradients
    assert critic.total == critic.transient == gone + max(critic.activations + critic.logits, critic.optimizer)
    (actor,) = memory.stage_memory(replace(role, name="actor", model_role="actor"), VOCAB, "train", 9, 1, 100)
    assert actor.resident == actor.weights + 100 and actor.host == actor.optimizer
    (rollout,) = memory.stage_memory(replace(role, name="rollout", model_role="rollout"), VOCAB, "generate", 9, 1, 100)
    assert rollout.resident == rollout.weights + 100 and rollout.host == 0
    with fake_world(1):
        wrapped = build(flags, "llama", False)[3]
    largest = max(b.grad_data.nbytes for w in wrapped for b in w.buffers + w.expert_parallel_buffers)
    on_actor = replace(role, name="rollout", model_role="actor")
    for cache in (100, 2**30):  # what the gradients have no room for
        (hosted,) = memory.stage_memory(on_actor, VOCAB, "generate", 9, 1, cache)
        assert hosted.kv_cache == cache and hosted.resident == max(0, cache - largest)


def average_of_rank(rank: int, flags: str) -> tuple[int, int]:
    """(real, planned) bytes of the actor's moving average on this rank."""
    from megarl.mcore.lora import adapter
    from megarl.mcore.model import gpt
    from megarl.mcore.training import optimizer
    from megarl.mcore.training.weight_average import WeightAverage

    args, place = join_actor(flags, "llama")
    role = parse_roles(flags, dist.get_world_size())["actor"]
    stages = gpt.build_model(args, VOCAB, place.pg_collection)
    if role.lora:
        adapter.add_factors(stages, role.lora, args, place.pg_collection)
    optimizer.wrap_for_training(stages, args, place.pg_collection)
    planned = memory.average_bytes(role, VOCAB, "train")[dist.get_rank(place.pg_collection.pp)]
    return WeightAverage(stages, 0.5).bytes, planned


@pytest.mark.parametrize("flags, ranks", [
    (f"{DENSE_FIRST} {EP2} {PP2}", 4), ("--bf16 --lora-rank 4", 1), (SHARDED, 2),
])  # fmt: skip
def test_a_moving_average_has_the_planned_bytes(flags, ranks):
    found = run_world(average_of_rank, ranks, flags)
    assert all(real == planned > 0 for real, planned in found[: 1 if flags == SHARDED else ranks])


ODD = "--ffn-hidden-size 33 --make-vocab-size-divisible-by 21"


@pytest.mark.parametrize("cases", [
    [(ODD, "llama"), ("--bf16", "recurrent")], long([("", "llama"), ("--bf16", "llama"), ("--bf16", "mamba")]),
])  # fmt: skip
def test_sharded_roles_hold_their_rows(cases):
    first, second = run_world(sharded_step, 2, cases)
    for (real, planned), (other, _) in zip(first, second, strict=True):
        assert real == planned
        assert all(other[i] <= real[i] for i in range(3))


HOST = f"{DISTRIBUTED} --optimizer-cpu-offload --optimizer-offload-fraction"
HOST_MODELS = [
    (f"{DENSE_FIRST} {EP2} --bf16 {HOST} 0.4", "llama", 4), (f"{HOST} 1 --bf16", "recurrent", 2),
    (f"{VPP} --bf16 {HOST} 0.7", "llama", 4), (f"{SMALL_SECOND} --tensor-model-parallel-size 2 {HOST} 0.5", "gpt2", 2),
    (f"{HOST} 0.3 --overlap-grad-reduce --ddp-bucket-size 5000", "llama", 3),
]  # fmt: skip


@pytest.mark.parametrize("flags, shape, ranks", by_default(HOST_MODELS, HOST_MODELS[:1]))
def test_states_on_the_host_are_exact_on_every_rank(flags, shape, ranks):
    from megarl.mcore.offload import bytes_on_host
    from megarl.mcore.parallel.process_groups import fake_world

    for rank in range(ranks):
        with fake_world(ranks, rank):
            args, pg_collection, stages, wrapped, optimizer = build(flags, shape, False)
            planned = check_weights(args, pg_collection, stages, False, rank, ranks)
            stage = dist.get_rank(pg_collection.pp)
            each = ranks // dist.get_world_size(pg_collection.pp)
            parts = memory.host_part(parameters.stage_weights(args, VOCAB, False)[stage], args, stage)
            gone, on_host = (int(part[rank % each * len(part) // each]) for part in parts)
            moved = [part.optimizer.on_host for part in optimizer.chained_optimizers]
            weights, gradients, states = real_bytes(stages, wrapped, optimizer)
            states -= sum(
                (main.nbytes if main is not shard.weights else 0)
                + sum(moment.nbytes for moment in part.optimizer.state[main].values())
                for part, shards in zip(optimizer.chained_optimizers, moved, strict=True)
                for main, shard in shards.items()
            )
            assert planned == (weights, gradients, states + gone) and gone > 0
            assert on_host == bytes_on_host(optimizer)


def test_a_stage_has_on_device_and_host_what_the_fraction_leaves():
    flags = f"--bf16 {DISTRIBUTED}"
    shares = [memory.stage_memory(parse_roles(f"{flags} {more}", 1)["actor"], VOCAB, "train", 9, 1, 0)[0]
              for more in ("", f"{HOST} 1", f"{HOST} 0.5")]  # fmt: skip
    device, host, half = shares
    assert (device.host, host.optimizer, host.host) == (0, 0, device.optimizer // 12 * 16)
    assert device.total - host.total == device.optimizer and 0.5 <= half.optimizer / device.optimizer < 0.6
    assert half.host == (device.optimizer - half.optimizer) // 12 * 16
