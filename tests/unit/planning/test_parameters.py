"""Memory of the plan against real models with low-rank factors or frozen by name: exact bytes, on every rank."""

import json
import re
from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl import arguments
from megarl.comm import role_mesh
from megarl.errors import UsageError
from megarl.mcore.config.optimizer_flags import has_muon, multiplier
from megarl.planning import memory, parameters, traffic
from tests.helpers.folders import any_types
from tests.helpers.folders.deepseek_configs import DEEPSEEK_V3 as V3
from tests.helpers.folders.deepseek_configs import DEEPSEEK_YARN as YARN
from tests.helpers.folders.deepseek_configs import KIMI_K2
from tests.helpers.folders.published_families import NEMOTRON_H
from tests.helpers.models.tiny_models import CHOOSING, LENGTHS, SHAPES, VOCAB, parse_roles
from tests.helpers.tiers import by_default, long
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
    ("", "ling", False, 1), (f"{TP2} --sequence-parallel --bf16", "kimi", False, 2),
    (f"--moe-latent-size 24 {MOE} {SHARED} {EP2}", "llama", False, 2),
    ("", "latent", False, 1), (f"{CHOOSING} --dsa-indexer-layers 1,0 {TP2}", "latent", False, 2),
    (f"{TP2} --sequence-parallel {MOE} {SHARED} {EP2}", "latent", False, 4),
]  # fmt: skip


@pytest.mark.parametrize("targets", ["all-linear", long("q_proj,v_proj,down_proj")])
@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"])
@pytest.mark.parametrize("flags, shape, value_head, ranks", by_default(MODELS, MODELS[1::3]))
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
    from megarl.mcore.training import optimizer

    kind = "value" if value_head else "train"
    found: dict[int, list] = {}
    for rank in range(ranks):
        with fake_world(ranks, rank):
            roles = parse_roles(flags, ranks, shape, "reward" if value_head and "--freeze" in flags else "sft")
            ((name, role),) = roles.items()
            groups = role_mesh.create_mesh(roles, timedelta(minutes=1))[name].pg_collection
            stages = gpt.build_model(role.megatron, VOCAB, groups, value_head)
            optimizer.freeze(stages, role.megatron, groups)
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
            adapter.add_factors(stages, role.lora, role.megatron, groups, is_frozen=True)
            (planned,) = memory.stage_memory(role, VOCAB, "generate", 64, 1, 0)
            assert planned.weights == sum(p.nbytes for p in stages.parameters())
            sent += sum(p.nbytes for chunk in stages for p in chunk.adapter.parameters())
    assert traffic.weights_to_rollout(roles, VOCAB) == sent > 0


def sharded_bytes_of_rank(rank: int, flags: str, value_head: bool, folder=None):
    """(real, planned) bytes of weights, gradients and optimizer states after an update, under FSDP."""
    from tests.helpers.folders import any_measures
    from tests.helpers.models.lora_models import trainable, update_once

    model, _ = any_measures.trainable(folder, flags) if folder else trainable(flags, value_head)
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


@pytest.mark.parametrize("flags, value_head", [
    long(("", False)), long(("", True)), ("--bf16", False), long((TP2, False)),
])  # fmt: skip
def test_sharded_bytes_are_exact(flags, value_head):
    real, planned = run_world(sharded_bytes_of_rank, 4, f"--use-torch-fsdp2 --lora-rank 4 {flags}", value_head)[0]
    assert real == planned


# A block that several layers share, which each rank has whole; layers with experts; factors.
@pytest.mark.parametrize("kind, flags", [("zamba2", ""), long(("granite", "--lora-rank 4"))])
def test_sharded_bytes_of_a_module_are_exact(kind, flags, tmp_path):
    any_types.save(kind, tmp_path / kind, vocab_size=VOCAB)
    real, planned = run_world(sharded_bytes_of_rank, 2, f"--use-torch-fsdp2 {flags}", False, tmp_path / kind)[0]
    assert real == planned


V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "num_hidden_layers": 60,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 16.0,
    "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400,
}  # fmt: skip
V2_LITE = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_method": "greedy",
}  # fmt: skip

# What its config.json says beside the defaults of the class.
QWEN3_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936,
              "hidden_size": 2048, "rope_theta": 10000000, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
              "max_position_embeddings": 262144, "full_attention_interval": 4, "num_experts": 512}  # fmt: skip

# What its config.json says beside the defaults of the class.
NEMOTRON_3 = NEMOTRON_H | {
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64, "num_key_value_heads": 2, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
}  # fmt: skip
NEMOTRON_3_SUPER = NEMOTRON_3 | {
    "hidden_size": 4096, "mamba_num_heads": 128, "num_attention_heads": 32, "n_routed_experts": 512,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024, "routed_scaling_factor": 5.0,
}  # fmt: skip

# config.json, parameters in all and of one token in billions: 2412.19437, 2507.20534, 2405.04434 and its appendix B.
PUBLISHED = {"V3": (V3, 671, 37), "K2": (KIMI_K2, 1026, 32), "V2": (V2, 236, 21), "V2-Lite": (V2_LITE, 15.7, 2.4),
          "Qwen3-Next": (QWEN3_NEXT, 79.7, 3.3),  # of its card, which says 80 and 3
          "Nemotron-H-8B": (NEMOTRON_H, 8.1, 8.1), "Nemotron-3-Nano": (NEMOTRON_3, 31.6, 3.2),
          "Nemotron-3-Super": (NEMOTRON_3_SUPER, 121, 12.7)}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name, tmp_path):
    config, total, active = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"--hf-model {tmp_path} --max-prompt-length 8 --max-response-length 8 --global-batch-size 1 --bf16"
    (role,) = arguments.parse(flags.split(), 1, "sft").roles.values()
    found = parameters.parameter_totals(role.megatron, config["vocab_size"], False)
    assert round(found.total / 1e9, 1 if total < 100 else 0) == total
    embedding = config["vocab_size"] * config["hidden_size"]  # not everyone counts it, or the head, as active
    assert found.active - 2 * embedding <= active * 1e9 <= found.active + 0.5e9


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3_text"])
def test_a_module_of_transformers_has_the_parameters_of_megarls_layers(kind, tmp_path):
    run_world(lambda _: any_types.small_config(kind, vocab_size=256).save_pretrained(tmp_path), 1)
    flags = f"--hf-model {tmp_path} --max-prompt-length 8 --max-response-length 8 --global-batch-size 1"
    of_layers, of_module = (
        parameters.parameter_totals(role.megatron, 256, False)
        for more in ("", " --model-source transformers")
        for role in arguments.parse(f"{flags}{more}".split(), 1, "sft").roles.values()
    )
    assert of_module == of_layers and (of_module.active < of_module.total) == (kind == "qwen3_moe")


PP2 = "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
HOST = "--optimizer-cpu-offload"
REFUSED = [  # flags, ranks, what the message says
    ("--freeze decoder.layer.0.*", 1, "actor: --freeze decoder.layer.0.*: names no parameter of the actor; "
     "nearest: decoder."),
    ("--freeze x", 1, "names no parameter of the actor; nearest: "),
    ("--freeze decoder.layers.2.*", 1, "--freeze decoder.layers.2.*: names no parameter"),
    ("--freeze output_layer.weight", 1, "names no parameter of the actor; nearest: "),  # it is tied
    ("--freeze *.local_experts.0.*", 1, "nearest: decoder.layers.*.mlp.experts."),
    ("--freeze *", 1, "--freeze *: leaves nothing to train"),
    ("--freeze decoder.* embedding.*", 1, "leaves nothing to train"),
    (f"{PP2} --freeze decoder.layers.0.* embedding.*", 2, "leaves nothing to train on pipeline stage 0; use fewer"),
    (f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --freeze decoder.layers.2.*", 2,
     "leaves nothing to train on pipeline stage 0"),
    ("--freeze embedding.* --lora-rank 2", 1, "--freeze: not allowed with low-rank factors"),
    ("--lr-multipliers *=2 --lora-rank 2", 1, "--lr-multipliers: not allowed with low-rank factors"),
    ("--lr-multipliers *.router.*=0.1", 1, "--lr-multipliers *.router.*=0.1: names no parameter"),
    ("--lr-multipliers embedding.*=2 *=0.5", 1, "--lr-multipliers embedding.*=2: has no effect: later patterns"),
    ("--lr-multipliers embedding.*=2 --freeze embedding.*", 1, "names only parameters that are not trained"),
    ("--lr-multipliers embedding.*", 1, "allowed is PATTERN=FACTOR with a factor of 0 or more"),
    ("--lr-multipliers embedding.*=-1", 1, "'embedding.*=-1': allowed is PATTERN=FACTOR"),
    ("--lr-multipliers embedding.*=inf", 1, "allowed is PATTERN=FACTOR"),
    ("--weight-decay-multipliers =3", 1, "'=3': allowed is PATTERN=FACTOR"),
    ("--weight-decay-multipliers *=2 --weight-decay 0", 1, "none without a --weight-decay above 0"),
    ("--freeze", 1, "--freeze: expected at least one argument"),
    ("--sgd-momentum 0.5", 1, "--sgd-momentum 0.5: allowed is none without --optimizer sgd"),
    ("--optimizer sgd --sgd-momentum 1", 1, "--sgd-momentum 1.0: allowed is from 0 to below 1"),
    ("--optimizer sgd --adam-beta2 0.9", 1, "--adam-beta2 0.9: allowed is none with --optimizer sgd"),
    ("--optimizer lion", 1, "--optimizer lion"),
    ("--exp-avg-dtype bf16", 1, "--exp-avg-dtype bf16: allowed is fp32 without --use-precision-aware-optimizer"),
    ("--use-precision-aware-optimizer", 1, "allowed is none without --exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16"),
    ("--use-precision-aware-optimizer --exp-avg-dtype fp16", 1, "--exp-avg-dtype: invalid choice: 'fp16'"),
    ("--use-precision-aware-optimizer --exp-avg-sq-dtype fp8", 1, "--exp-avg-sq-dtype: invalid choice: 'fp8'"),
    ("--use-precision-aware-optimizer --exp-avg-sq-dtype bf16", 1, "--adam-beta2 0.999: allowed is at most 0.99 with"),
    ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --adam-beta1 0.995", 1, "--adam-beta1 0.995: allowed is at"),
    ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer sgd", 1, "none without --optimizer adam"),
    ("--main-params-dtype fp16", 1, "--main-params-dtype is a Megatron flag that megarl does not use"),
    (HOST, 1, "--optimizer-cpu-offload True: allowed is none without --use-distributed-optimizer"),
    (f"{HOST} --use-torch-fsdp2", 2, "--optimizer-cpu-offload True: allowed is none with --use-torch-fsdp2"),
    (f"{HOST} --optimizer sgd", 1, "--optimizer-cpu-offload True: allowed is none without --optimizer adam"),
    *((f"{HOST} --use-distributed-optimizer --optimizer-offload-fraction {fraction}", 1, "allowed is above 0, at most")
      for fraction in ("0", "1.5")),
    (f"{HOST} --use-distributed-optimizer --optimizer-offload-fraction nan", 1, "allowed is a finite number"),
    ("--optimizer-offload-fraction 0.5", 1, "fraction 0.5: allowed is none without --optimizer-cpu-offload"),
    ("--overlap-cpu-optimizer-d2h-h2d", 1, "allowed is none without --optimizer-cpu-offload"),
    ("--no-pin-cpu-grads", 1, "--no-pin-cpu-grads True: allowed is none without --optimizer-cpu-offload"),
    ("--no-pin-cpu-params", 1, "--no-pin-cpu-params is a Megatron flag that megarl does not use"),
    ("--muon-momentum 0.5", 1, "--muon-momentum 0.5: allowed is none without --optimizer muon"),
    ("--muon-no-split-qkv", 1, "--muon-no-split-qkv True: allowed is none without --optimizer muon"),
    *(("--optimizer muon", 1, "--optimizer muon: allowed is adam or sgd without the package emerging-optimizers; run "
       "bash "),) * (not has_muon()),
    *(row for row in (
        ("--optimizer muon --fp16", 1, "--fp16 True: allowed is none with --optimizer muon"),
        ("--optimizer muon --use-torch-fsdp2", 2, "--use-torch-fsdp2 True: allowed is none with --optimizer muon"),
        ("--optimizer muon --lora-rank 2", 1, "--optimizer muon: not allowed with low-rank factors"),
        ("--optimizer muon --tensor-model-parallel-size 4", 4, "allowed is at most --num-query-groups 2 with"),
        ("--optimizer muon --muon-momentum 1", 1, "--muon-momentum 1.0: allowed is from 0 to below 1"),
        ("--optimizer muon --muon-num-ns-steps 0", 1, "--muon-num-ns-steps 0: allowed is 1 or more"),
        ("--optimizer muon --muon-extra-scale-factor 0", 1, "allowed is above 0"),
        ("--optimizer muon --muon-coefficient-type cubic", 1, "allowed is one of simple, quintic,"),
        ("--optimizer muon --muon-fp32-matmul-prec low", 1, "--muon-fp32-matmul-prec: invalid choice: 'low'"),
        ("--optimizer muon --muon-scalar-optimizer lion", 1, "vectors, embeddings and heads are trained by Adam"),
    ) if has_muon()),
]  # fmt: skip


def checked(flags: str, size: int, program: str = "sft"):
    """The Megatron namespaces of a run's roles."""
    config = arguments.parse(f"{SHAPES['llama']} {LENGTHS} {flags}".split(), size, program)
    parameters.check_patterns(config)
    return {name: role.megatron for name, role in config.roles.items()}


@pytest.mark.parametrize("flags, size, says", REFUSED)
def test_what_is_refused(flags, size, says):
    shape = f"{EXPERTS} " if "experts" in flags else ""
    with pytest.raises(UsageError, match=re.escape(says)) as found:
        checked(shape + flags, size)
    assert "\n" not in str(found.value) and len(str(found.value)) < 400


def test_a_hostile_pattern_is_matched_in_bounded_time():
    with pytest.raises(UsageError, match="names no parameter"):
        checked(f"--freeze {'*a' * 40}*b", 1)


@pytest.mark.parametrize("flags, size", [
    (f"{PP2} --freeze decoder.layers.0.*", 2),  # the embedding is trained
    ("--freeze embedding.word_embeddings.weight *.layers.0.mlp.*", 1),
    (f"{EXPERTS} --freeze *.router.weight --lr-multipliers *.mlp.experts.*=2", 1),
])  # fmt: skip
def test_what_is_allowed(flags, size):
    assert checked(flags, size)["actor"].freeze


def test_roles_have_patterns_of_their_own():
    flags = "--max-tokens-per-microbatch 96 --critic-freeze output_layer.* --actor-lr-multipliers *=3 *.mlp.*=0.5"
    roles = checked(flags, 1, "rl")
    actor, critic = roles["actor"], roles["critic"]
    assert (actor.freeze, critic.freeze, critic.lr_multipliers) == (None, ["output_layer.*"], None)
    assert multiplier(actor, "lr_multipliers", "decoder.layers.0.mlp.linear_fc1.weight") == 0.5
    assert multiplier(actor, "lr_multipliers", "decoder.final_layernorm.weight") == 3
    assert multiplier(actor, "weight_decay_multipliers", "decoder.final_layernorm.weight") == 1
