"""Memory of the plan against real models with low-rank factors or frozen by name: exact bytes, on every rank."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl.comm import role_mesh
from megarl.planning import memory, traffic
from tests.helpers.tiers import by_default, long
from tests.helpers.tiny_models import VOCAB, parse_roles
from tests.helpers.worlds import run_world

MOE = "--num-experts 4 --moe-ffn-hidden-size 36 --moe-router-topk 2 --moe-layer-freq [0,1]"
SHARED = "--moe-shared-expert-intermediate-size 50"
TP2, PP2, EP2 = (f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
MODELS = [
    ("", "llama", False, 1), ("", "llama", True, 1), ("--bf16", "llama", False, 2), ("", "gpt2", False, 1),
    (f"{MOE} {SHARED}", "llama", False, 1), (f"{MOE} {EP2}", "llama", False, 4), (TP2, "llama", True, 2),
    (f"{TP2} --sequence-parallel {PP2} {MOE} {SHARED} {EP2}", "llama", False, 4),
    (f"{TP2} --num-query-groups 1", "llama", False, 2),
    ("", "recurrent", False, 1), (f"{TP2} --num-query-groups 1 --bf16", "recurrent", False, 2),
    ("", "mamba", False, 1), (f"{TP2} --sequence-parallel --bf16", "mamba", False, 2),
    (f"--moe-latent-size 24 {MOE} {SHARED} {EP2}", "llama", False, 2),
    ("", "latent", False, 1), (f"{TP2} --sequence-parallel {MOE} {SHARED} {EP2}", "latent", False, 4),
]  # fmt: skip


@pytest.mark.parametrize("targets", ["all-linear", long("q_proj,v_proj,down_proj")])
@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"])
@pytest.mark.parametrize("flags, shape, value_head, ranks", MODELS)
def test_bytes_are_exact(flags, shape, value_head, ranks, more, targets):
    targets = targets.replace("q_proj,v_proj", "q_b_proj,kv_a_proj_with_mqa") if shape == "latent" else targets
    check_bytes(f"{flags} {more} --lora-rank 3 --lora-targets {targets}", shape, value_head, ranks)


FROZEN = [
    ("--freeze embedding.* *.layers.0.*", "gpt2", False, 1),
    (f"{MOE} {EP2} --freeze *.mlp.experts.*", "llama", True, 4),
    (f"{PP2} --num-layers 4 --freeze embedding.* *.layers.2.* --bf16", "llama", False, 2),
    (f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --freeze *.layers.2.mlp.*", "llama", False, 2),
    (f"{TP2} --optimizer sgd --freeze *layernorm.weight *.linear_qkv.*", "gpt2", False, 2),
]  # fmt: skip


@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"])
@pytest.mark.parametrize("flags, shape, value_head, ranks", by_default(FROZEN, FROZEN[2:3]))
def test_bytes_of_models_frozen_by_name_are_exact(flags, shape, value_head, ranks, more):
    check_bytes(f"{flags} {more}", shape, value_head, ranks)


def check_bytes(flags: str, shape: str, value_head: bool, ranks: int):
    """The plan has the bytes of the fullest rank of each stage."""
    from megarl.mcore.lora import adapter
    from megarl.mcore.model import gpt
    from megarl.mcore.parallel.process_groups import fake_world
    from megarl.mcore.training import optimizer, parameter_groups

    kind = "value" if value_head else "train"
    found: dict[int, list] = {}
    for rank in range(ranks):
        with fake_world(ranks, rank):
            roles = parse_roles(flags, ranks, shape, "reward" if value_head and "--freeze" in flags else "sft")
            ((name, role),) = roles.items()
            groups = role_mesh.create_mesh(roles, timedelta(minutes=1))[name].pg_collection
            stages = gpt.build_model(role.megatron, VOCAB, groups, value_head)
            parameter_groups.freeze(stages, role.megatron, groups)
            if role.lora:
                adapter.add_factors(stages, role.lora, role.megatron, groups)
            wrapped = optimizer.wrap_for_training(stages, role.megatron, groups)
            adapter.keep_base(stages)
            built = optimizer.build_optimizer(wrapped, role.megatron, groups)
            buffers = [b for w in wrapped for b in w.buffers + w.expert_parallel_buffers]
            held = sum(
                sum(p.nbytes for p in b.params) if b.param_data is None else b.param_data.nbytes for b in buffers
            )
            held += sum(p.nbytes for p in stages.parameters() if not p.requires_grad)
            own = {p.untyped_storage().data_ptr() for p in stages.parameters()}
            states = [t for part in built.chained_optimizers for s in part.optimizer.state.values() for t in s.values()]
            masters = [p for part in built.chained_optimizers for group in part.optimizer.param_groups
                       for p in group["params"] if p.untyped_storage().data_ptr() not in own]  # fmt: skip
            found.setdefault(dist.get_rank(groups.pp), []).append(
                (held, sum(b.grad_data.nbytes for b in buffers), sum(t.nbytes for t in states + masters))
            )
            planned = memory.stage_memory(role, VOCAB, kind, 64, 1, 0)
    for stage, of_ranks in found.items():
        largest = tuple(max(numbers) for numbers in zip(*of_ranks, strict=True))
        assert (planned[stage].weights, planned[stage].gradients, planned[stage].optimizer) == largest


@pytest.mark.parametrize("flags, ranks", [("", 3), (MOE, 3), (f"--rollout-{TP2[2:]}", 4)])
def test_a_rollout_gets_the_factors_of_16_bits(flags, ranks):
    """Its weights are those of a model with factors, and only these travel after each update."""
    from megarl.mcore.lora import adapter
    from megarl.mcore.model import gpt
    from megarl.mcore.parallel.process_groups import fake_world

    places = f"--role-map actor=0-1;critic=0;reward=0;rollout=2-{ranks - 1} --kl-coefficient 0"
    sent = 0
    for rank in range(2, ranks):
        with fake_world(ranks, rank):
            roles = parse_roles(f"{flags} {places} --bf16 --lora-rank 3", ranks, program="rl")
            role, groups = roles["rollout"], role_mesh.create_mesh(roles, timedelta(minutes=1))["rollout"].pg_collection
            stages = gpt.build_frozen_model(role.megatron, VOCAB, groups)
            adapter.add_frozen_factors(stages, role.lora, role.megatron, groups)
            (planned,) = memory.stage_memory(role, VOCAB, "generate", 64, 1, 0)
            assert planned.weights == sum(p.nbytes for p in stages.parameters())
            sent += sum(p.nbytes for chunk in stages for p in chunk.adapter.parameters())
    assert traffic.weights_to_rollout(roles, VOCAB) == sent > 0


def sharded_bytes_of_rank(rank: int, flags: str, value_head: bool):
    """(real, planned) bytes of weights, gradients and optimizer states after an update, under FSDP."""
    from tests.helpers.lora_models import trainable, update_once

    model, _ = trainable(flags, value_head)
    update_once(model, model.role_groups, value_head=value_head)

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    held = [local(p) for p in model.model.parameters()]
    own = {p.untyped_storage().data_ptr() for p in held}
    gradients = [p for p in model.model.parameters() if p.requires_grad]
    in_fp32 = model.role.megatron.accumulate_allreduce_grads_in_fp32
    states = 0
    for part in model.optimizer.chained_optimizers:
        masters = [local(p) for group in part.optimizer.param_groups for p in group["params"]]
        states += sum(p.nbytes for p in masters if p.untyped_storage().data_ptr() not in own)
        states += sum(local(t).nbytes for state in part.optimizer.state.values() for t in state.values())
    real = (sum(p.nbytes for p in held),
            sum(local(p).numel() * (4 if in_fp32 else p.element_size()) for p in gradients), states)  # fmt: skip
    (planned,) = memory.stage_memory(model.role, VOCAB, "value" if value_head else "train", 64, 1, 0)
    return real, (planned.weights, planned.gradients, planned.optimizer)


@pytest.mark.parametrize(
    "flags, value_head", [long(("", False)), long(("", True)), ("--bf16", False), long((TP2, False))]
)
def test_sharded_bytes_are_exact(flags, value_head):
    for real, planned in run_world(sharded_bytes_of_rank, 4, f"--use-torch-fsdp2 --lora-rank 4 {flags}", value_head)[
        :1
    ]:
        assert real == planned
