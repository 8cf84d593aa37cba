"""Every accepted flag of Megatron's changes something that a run reads: no flag is parsed and forgotten.

Small runs of the real program note which attributes of the roles' flags, and of Megatron's configs made from them, code
reads that does more than check or copy them. Each flag must change one of these.
"""

import argparse
import contextlib
import dataclasses
import functools
import re
import sys

import pytest

from megarl.errors import UsageError
from megarl.mcore.config.optimizer_flags import has_muon
from tests.helpers import programs
from tests.helpers.worlds import RankFailed, run_world

# Files whose reads only check, print or copy: the configs' own, those of flags, and generated methods.
COPYING = (
    "transformer_config.py", "model_parallel_config.py", "optimizer_config.py", "dataclasses.py", "copy.py",
    "distributed_data_parallel_config.py", "arguments.py", "argument_utils.py", "argparse.py", "<string>",
)  # fmt: skip
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
LATENT = ("--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8"
          " --v-head-dim 14 --qk-layernorm")  # fmt: skip
DELTA_NET = ("--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2"
             " --linear-num-value-heads 4 --linear-key-head-dim 24 --linear-value-head-dim 16 --normalization RMSNorm"
             " --disable-bias-linear")  # fmt: skip
MAMBA = ("--num-layers 4 --hybrid-layer-pattern M*M- --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2"
         " --mamba-state-dim 16 --normalization RMSNorm --disable-bias-linear")  # fmt: skip
CHANNELS = f"{DELTA_NET} --linear-num-key-heads 4 --linear-key-head-dim 16"
YARN, LLAMA3 = "--position-embedding-type yarn", "--use-rope-scaling"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
BALANCE = ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
           " --moe-router-enable-expert-bias --moe-router-score-function sigmoid")  # fmt: skip
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2"
SHARED = "--moe-shared-expert-intermediate-size 32"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TWO_RATES = "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"
GROUPED = " --group-query-attention --num-query-groups 2"

MUON = {
    "muon_momentum", "muon_split_qkv", "muon_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec",
    "muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor",
}  # fmt: skip

RUNS = [  # ranks, flags
    (1, f"--bf16 --use-distributed-optimizer {FULL} --window-size 3,0 {TWO_RATES}"),
    (1, f"--fp16 {SELECTIVE} core_attn mlp --position-embedding-type learned_absolute"),
    (1, f"{EXPERTS} {BALANCE} {SHARED} {GROUPS} {LLAMA3} --router-replay rollout {SELECTIVE} moe"),
    (1, f"{LATENT} {YARN} --freeze *.layers.0.* --lr-multipliers *.mlp.*=2 --weight-decay-multipliers *.mlp.*=2"),
    (1, f"{DELTA_NET} --optimizer sgd"),
    *((1, "--optimizer muon"),) * has_muon(),
    (1, f"{MAMBA} {EXPERTS} --hybrid-layer-pattern M*ME --moe-latent-size 16"),
    (2, f"{TP2} --sequence-parallel"),
    (2, f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
]

# Flags without which another one has no effect or is refused: company -> attributes.
COMPANY = {
    EXPERTS: "expert_model_parallel_size moe_ffn_hidden_size moe_router_topk",
    f"{EXPERTS} --disable-bias-linear": "moe_latent_size",
    f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss": "moe_aux_loss_coeff",
    f"{EXPERTS} --moe-router-score-function sigmoid": "moe_router_enable_expert_bias",
    f"{EXPERTS} {GROUPS}": "moe_router_num_groups moe_router_group_score",
    f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1": "moe_router_group_topk",
    LATENT: "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim latent_norm_epsilon",
    f"{LATENT} {YARN}": "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow mscale mscale_all_dim "
                        "yarn_correction_range_round_to_int rotary_scaling_factor use_rotary_position_embeddings",
    DELTA_NET: "linear_attention_freq linear_num_key_heads linear_num_value_heads linear_key_head_dim "
               "linear_value_head_dim linear_conv_kernel_dim attention_output_gate",
    f"{DELTA_NET} --bf16": "delta_rule_backend",
    CHANNELS: "linear_channel_decay", f"{CHANNELS} --linear-channel-decay": "linear_gate_rank linear_decay_bound",
    MAMBA: "mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim mamba_dt_min",
    MAMBA.replace("M*M-", "MMMM"): "hybrid_layer_pattern",
    "--normalization RMSNorm --disable-bias-linear": "experimental_attention_variant",
    LLAMA3: "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_position_embeddings",
    "--window-size 3,0": "window_attn_skip_freq window_rotary_base",
    "--kv-channels 16": "rotary_divisors",
    "--swiglu": "glu_linear_offset activation_func_clamp_value",
    "--normalization RMSNorm": "qk_layernorm_all_heads",
    "--disable-bias-linear": "add_qkv_bias",
    "--group-query-attention": "num_query_groups",
    "--recompute-granularity selective": "recompute_modules",
    "--decoupled-lr 1e-4": "decoupled_min_lr",
    "--optimizer sgd": "sgd_momentum",
    "--use-distributed-optimizer": "optimizer_cpu_offload",
    "--use-distributed-optimizer --optimizer-cpu-offload":
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --adam-beta2 0.9": "exp_avg_sq_dtype",
    "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --adam-beta2 0.9": "exp_avg_dtype",
    **({"--optimizer muon": " ".join(MUON)} if has_muon() else {}),
    "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2":
        "start_weight_decay end_weight_decay weight_decay_incr_style",
    TP2: "sequence_parallel",
    PP2: "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
         "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2":
        "overlap_p2p_comm_warmup_flush overlap_p2p_comm",
}  # fmt: skip

# Values that differ from the defaults and are allowed, where the type alone gives none: attribute -> tokens.
VALUES = {
    "window_size": "5,0", "window_attn_skip_freq": "2", "hidden_size": "128", "attention_backend": "eager",
    "recompute_granularity": "selective", "recompute_modules": "mlp", "recompute_num_layers": "2",
    "moe_layer_freq": "2", "max_position_embeddings": "64", "lr_wsd_decay_iters": "3", "min_lr": "1e-6",
    "lr_warmup_init": "1e-6", "decoupled_min_lr": "1e-6", "decoder_first_pipeline_num_layers": "1",
    "decoder_last_pipeline_num_layers": "1",
    "num_layers_per_virtual_pipeline_stage": "1", "num_virtual_stages_per_pipeline_rank": "2", "yarn_beta_fast": "40",
    "rotary_scaling_factor": "4", "rope_scaling_factor": "4", "rope_high_freq_factor": "8", "num_query_groups": "4",
    "moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none", "moe_router_num_groups": "2",
    "moe_router_group_topk": "2", "moe_router_topk": "1 --moe-router-pre-softmax", "position_embedding_type": "none",
    "weight_decay_incr_style": "cosine", "start_weight_decay": "0.15", "end_weight_decay": "0.3",
    "hybrid_layer_pattern": "M*M-", "experimental_attention_variant": "gated_delta_net --linear-attention-freq 2",
    "linear_attention_freq": "4", "linear_num_key_heads": "4", "linear_num_value_heads": "8",
    "linear_conv_kernel_dim": "3", "linear_decay_bound": "-5", "mamba_num_groups": "4",
    "muon_coefficient_type": "simple", "muon_tp_mode": "blockwise",
    "lr_multipliers": "*=2", "weight_decay_multipliers": "*=2", "freeze": "*",
    "moe_token_dispatcher_type": "allgather", "pretrained_checkpoint": "x", "no_rope_freq": "2",
    "rotary_divisors": "1,1,1,1,2,2,4,4",
}  # fmt: skip

# Switches that ask for what every run has here anyway, so their opposites are not to be had.
ALREADY_SO = {
    "--calculate-per-token-loss", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion",
    "--yarn-correction-range-round-to-int", "--use-cpu-initialization", "--overlap-grad-reduce",
}  # fmt: skip
# Read by runs that resume (tests/unit/checkpoint/test_resume.py).
ON_RESUME = {("flags", f"{name}_opt_param_scheduler") for name in ("override", "use_checkpoint")}
# Read by runs with states on the host of a device (test_emulated_optimizer.py).
ON_DEVICES = {
    ("flags", name) for name in (
        "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads")
}  # fmt: skip
# Refused by Megatron without a GPU or Transformer Engine, or without one of those that `ONLY` refuses; by megarl: gloo,
# a switch without the types that it allows.
REFUSED_HERE = {
    "ep_overlap_early_attn_memory_release", "moe_permute_fusion", "moe_pad_expert_input_to_capacity",
    "log_max_attention_logit", "expert_tensor_parallel_size", "nccl_ub", "microbatch_group_size_per_vp_stage",
    "use_precision_aware_optimizer",
}  # fmt: skip


if not has_muon():
    REFUSED_HERE |= MUON


# -- what runs read ------------------------------------------------------------------------------------------------


def notes_reads(kind: type, read: set[str]):
    """Adds to `read` every attribute that is read from objects of the class, but not by code that copies or checks."""
    original = kind.__getattribute__

    def get(self, name):
        code = sys._getframe(1).f_code
        copies = code.co_filename.endswith(COPYING) or code.co_name == "_fields"
        if not copies and "/mcore/config/" not in code.co_filename and "/megarl/flags/" not in code.co_filename:
            read.add(name)
        return original(self, name)

    kind.__getattribute__ = get


class Flags(argparse.Namespace):
    """A role's flags whose reads are noted."""


def reads(rank: int, argv: list[str], size: int) -> dict[str, set[str]]:
    """One step of PPO on this rank; attributes read, by the object that has them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds = {
        "flags": Flags, "model": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig
    }  # fmt: skip
    parsed, read = programs.program("rl", argv, size), {name: set() for name in kinds}
    for name, kind in kinds.items():
        notes_reads(kind, read[name])
    for role in parsed.roles.values():
        role.megatron.__class__ = Flags
    programs.in_world(rank, "rl", parsed)
    return read


@functools.cache
def read_by_runs(folder) -> frozenset[tuple[str, str]]:
    """(object, attribute) of everything that a rank of one of the runs reads."""
    from megarl import train_rl  # noqa: F401  imported once, before the forks

    found = set()
    for number, (size, flags) in enumerate(RUNS):
        more = f"--train-iters 1 --reward exact-match {flags}"
        line = " ".join(programs.rl_argv(folder / str(number), more, warm_start=False))
        line = line.replace(GROUPED, "") if LATENT in flags else line
        for read in run_world(reads, size, line.split(), size):
            found |= {(kind, name) for kind, names in read.items() for name in names}
    return frozenset(found | ON_RESUME | ON_DEVICES)


# -- what flags change ---------------------------------------------------------------------------------------------


@functools.cache
def resolved(flags: str) -> dict[tuple[str, str], str]:
    """(object, attribute) -> value as text: a role's flags for four ranks, and Megatron's configs made from them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from megarl.mcore.config import megatron_flags

    shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128"
    own = {"train_iters": 10, "seed": 1, "seq_length": 48, "draws_weights": True}
    args = megatron_flags.parse("actor", f"{shape} {flags}".split(), 4, own)
    of_ddp = {"grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32, "bucket_size": args.ddp_bucket_size}
    copied = {
        name: {field.name: getattr(args, field.name, None) for field in dataclasses.fields(kind)}
        for name, kind in (("optimizer", OptimizerConfig), ("ddp", DistributedDataParallelConfig))
    }
    objects = copied | {"flags": vars(args), "model": vars(megatron_flags.transformer_config(args))}
    objects["ddp"] |= of_ddp
    return {
        (kind, name): re.sub(r" at 0x\w+", "", repr(value))
        for kind, values in objects.items()
        for name, value in values.items()
    }


def tokens(action: argparse.Action) -> str:
    """A value of a flag that is not its default; '' for a switch."""
    if action.nargs == 0 or action.dest in VALUES:
        return "" if action.nargs == 0 else VALUES[action.dest]
    if action.choices:
        return next(str(choice) for choice in action.choices if choice != action.default)
    if action.type is float:
        return str((action.default or 0.25) / 2)
    return str((action.default or 1) * 2) if action.type is int else "2"


def accepted() -> list[argparse.Action]:
    """Megatron's flags that megarl uses."""
    from megarl.mcore.config import megatron_flags, supported_flags

    return [action for action in megatron_flags._parser()._actions if action.dest in supported_flags.used()]


def changed(option: str, action: argparse.Action) -> set[tuple[str, str]] | None:
    """What a flag changes beside its company; None: it is refused there."""
    company = next((flags for flags, names in COMPANY.items() if action.dest in names.split()), "")
    before = resolved(company)
    try:
        after = resolved(f"{company} {option} {tokens(action)}")
    except UsageError:
        return None
    return {key for key in after if after[key] != before.get(key)}


def effects(rank: int, read: frozenset) -> tuple[dict, set]:
    """(switches without effect or with one that is not expected -> what they change, flags refused).

    In a process of its own: some of Megatron's configs change the process that makes them.
    """
    wrong, refused = {}, set()
    for action in accepted():
        for option in action.option_strings:
            found = changed(option, action)
            if found is None:
                refused.add(action.dest)
            elif bool(found & read) == (option in ALREADY_SO):
                wrong[option] = found
    return wrong, refused


@pytest.mark.long
def test_every_accepted_flag_changes_what_a_run_reads(tmp_path_factory):
    from megarl.mcore.config.supported_flags import ONLY

    read = read_by_runs(tmp_path_factory.mktemp("reads"))
    ((wrong, refused),) = run_world(effects, 1, read)
    assert not wrong, f"flags without effect: {wrong}"
    assert refused - set(ONLY) == REFUSED_HERE
    assert len(read) > 200


# -- what flags run ------------------------------------------------------------------------------------------------


def values_of(action: argparse.Action) -> list[str]:
    """Every value of a flag with choices, else one."""
    if action.nargs != 0 and action.choices and action.dest not in VALUES:
        return [str(choice) for choice in action.choices]
    return [tokens(action)]


def parsed_for_fewest_ranks(argv: list[str]):
    """(configuration, ranks) of a command line on one, two or four ranks; None: refused on all of them."""
    for size in (1, 2, 4):
        with contextlib.suppress(UsageError):
            return programs.program("rl", argv, size), size
    return None


PARTS = 8


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_accepted_flag_runs_a_step(part, tmp_path):
    """Whatever the parser accepts trains a step of GRPO, or is refused in one line before."""
    failed, runs = {}, 0
    for number, action in enumerate(accepted()[part::PARTS]):
        company = next((flags for flags, names in COMPANY.items() if action.dest in names.split()), "")
        for option in action.option_strings:
            for value in values_of(action):
                flags = f"--train-iters 1 --reward exact-match --advantage grpo {company} {option} {value}"
                line = " ".join(programs.rl_argv(tmp_path / str(number), flags, warm_start=False))
                found = parsed_for_fewest_ranks((line.replace(GROUPED, "") if LATENT in flags else line).split())
                if found is None:
                    continue
                runs += 1
                try:
                    run_world(programs.in_world, found[1], "rl", found[0])
                except RankFailed as error:
                    if "UsageError" not in str(error):
                        failed[f"{company} {option} {value}"] = str(error).splitlines()[-1]
    assert runs > 10 and not failed, failed


@pytest.mark.parametrize("flag", [
    "--ddp-average-in-collective", "--cross-entropy-loss-fusion", "--log-num-zeros-in-grad", "--flash-decode",
    "--cpu-offloading-num-layers 2", "--enable-cuda-graph", "--init-method-xavier-uniform", "--no-position-embedding",
    "--use-te-activation-func", "--cp-comm-type p2p", "--moe-apply-probs-on-input", "--no-align-param-gather",
])  # fmt: skip
def test_flags_that_had_no_effect_are_refused(flag):
    with pytest.raises(UsageError, match=f"{flag.split()[0]} is a Megatron flag that megarl does not use"):
        resolved(flag)
