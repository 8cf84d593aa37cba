"""Rules on layouts: each wrong layout is rejected with its flag and value, each rule can be broken, right ones pass."""

import functools

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.mcore.config import layout_rules
from tests.helpers.refused_rules import refused

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4"
    " --ffn-hidden-size 128 --swiglu --make-vocab-size-divisible-by 32 --max-prompt-length 5 --max-response-length 6"
)
GROUPED = "--disable-bias-linear --num-experts 8 --moe-router-topk 4 --moe-grouped-gemm --bf16"
MOE = "--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 4"
TP2, PP2, PP4 = (f"--{kind}-model-parallel-size {n}" for kind, n in (("tensor", 2), ("pipeline", 2), ("pipeline", 4)))
FSDP, CP2 = "--use-torch-fsdp2", "--context-parallel-size 2"
KIND, COEFF, BIAS = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-router-enable-expert-bias"

# Flags besides MODEL, ranks of every role, what the line must say.
WRONG = {
    "no layer": ("--num-layers -1", 1, "--num-layers -1"),
    "no width": ("--hidden-size -64", 1, "--hidden-size -64"),
    "no head": ("--num-attention-heads -8", 1, "--num-attention-heads -8"),
    "no group": ("--num-query-groups 0", 1, "--num-query-groups 0: allowed is 1 or more"),
    "no channel": ("--kv-channels 0", 1, "--kv-channels 0"),
    "no ffn": ("--ffn-hidden-size 0", 1, "--ffn-hidden-size 0"),
    "no expert ffn": (f"{MOE} --moe-ffn-hidden-size 0", 1, "--moe-ffn-hidden-size 0"),
    "negative experts": ("--num-experts -2", 1, "--num-experts -2"),
    "vocabulary in parts of 0": ("--make-vocab-size-divisible-by 0", 1, "--make-vocab-size-divisible-by 0"),
    "TP 0": ("--tensor-model-parallel-size 0", 1, "--tensor-model-parallel-size 0: allowed is 1 or more"),
    "PP 0": ("--pipeline-model-parallel-size 0", 1, "--pipeline-model-parallel-size 0: allowed is 1 or more"),
    "CP 0": ("--context-parallel-size 0", 1, "--context-parallel-size 0: allowed is 1 or more"),
    "EP 0": ("--expert-model-parallel-size 0", 1, "--expert-model-parallel-size 0: allowed is 1 or more"),
    "expert TP 0": ("--expert-tensor-parallel-size 0", 1, "--expert-tensor-parallel-size 0: allowed is 1 or more"),
    "negative rate": ("--lr -1", 1, "--lr -1.0"),
    "floor above the rate": ("--min-lr 1", 1, "--min-lr 1.0: allowed is from 0 to --lr 1e-05"),
    "negative clip": ("--clip-grad -1", 1, "--clip-grad -1.0"),
    "negative decay": ("--weight-decay -1", 1, "--weight-decay -1.0"),
    "beta 1": ("--adam-beta1 1", 1, "--adam-beta1 1.0"),
    "beta 2": ("--adam-beta2 -0.5", 1, "--adam-beta2 -0.5"),
    "floor of no rate of its own": ("--decoupled-min-lr 1e-6", 1,
                                    "--decoupled-min-lr 1e-06: allowed is none without --decoupled-lr"),
    "no layers": ("--num-layers 100001", 1, "--num-layers 100001: allowed is from 1 to 100000"),
    "no decay": ("--lr-decay-iters 0", 1, "--lr-decay-iters 0: allowed is 1 or more"),
    "warm-up below 0": ("--lr-warmup-iters -1", 1, "--lr-warmup-iters -1: allowed is 0 or more"),
    "warm-up alone": ("--lr-warmup-fraction 1", 1, "--lr-warmup-fraction 1.0: allowed is from 0 to below 1"),
    "spread of weights": ("--init-method-std nan", 1, "--init-method-std nan: allowed is 0 or more"),
    "epsilon of norms": ("--norm-epsilon 0", 1, "--norm-epsilon 0.0: allowed is above 0"),
    "loss scale": ("--fp16 --loss-scale 0", 1, "--loss-scale 0.0: allowed is above 0"),
    "first loss scale": ("--fp16 --initial-loss-scale -1", 1, "--initial-loss-scale -1.0: allowed is above 0"),
    "least loss scale": ("--fp16 --min-loss-scale 0", 1, "--min-loss-scale 0.0: allowed is above 0"),
    "steps of a loss scale": ("--fp16 --loss-scale-window 0", 1, "--loss-scale-window 0.0: allowed is above 0"),
    "overflows before a lower one": ("--fp16 --hysteresis 0", 1, "--hysteresis 0: allowed is 1 or more"),
    "negative rate of its own": ("--decoupled-lr nan", 1, "--decoupled-lr nan: allowed is 0 or more"),
    "its floor": ("--decoupled-lr 1 --decoupled-min-lr -1", 1, "--decoupled-min-lr -1.0: allowed is 0 or more"),
    "decay at first": ("--start-weight-decay -1 --end-weight-decay 1 --weight-decay-incr-style linear", 1,
                       "--start-weight-decay -1.0: allowed is 0 or more"),
    "decay at last": ("--start-weight-decay 1 --end-weight-decay nan --weight-decay-incr-style linear", 1,
                      "--end-weight-decay nan: allowed is 0 or more"),
    "WSD without decay": ("--lr-decay-style WSD --lr-wsd-decay-iters 0", 1, "--lr-wsd-decay-iters 0: allowed is 1 or"),
    "an endless clip": ("--clip-grad inf", 1, "--clip-grad inf: allowed is a finite number"),
    "two 16-bit types": ("--fp16 --bf16", 1, "--fp16 True: allowed is none with --bf16"),
    "no time": ("--distributed-timeout-minutes 0", 1, "--distributed-timeout-minutes 0: allowed is 1 or more"),
    "no bucket": ("--ddp-bucket-size 0", 1, "--ddp-bucket-size 0: allowed is 1 or more"),
    "epsilon": ("--adam-eps 0", 1, "--adam-eps 0.0"),
    "few positions": ("--max-position-embeddings 10", 1, "--max-position-embeddings 10: allowed is --max-prompt"),
    "warm-up from above": ("--lr 0.1 --lr-warmup-init 0.2", 1, "--lr-warmup-init 0.2: allowed is from 0 to --lr 0.1"),
    "two warm-ups": ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, "--lr-warmup-fraction 0.1: allowed is none"),
    "endless warm-up": ("--lr-warmup-iters 100", 1, "--lr-warmup-iters 100: allowed is below"),
    "TP of 3 ranks": (TP2, 3, "--tensor-model-parallel-size 2: allowed is a divisor of the role's 3 rank(s)"),
    "TP × PP × CP": (f"{TP2} {PP2} --context-parallel-size 2", 4, "--tensor-model-parallel-size 2 × --pipeline-model-"
                     "parallel-size 2 × --context-parallel-size 2: allowed is a product that divides the role's 4 r"),
    "EP × PP": (f"{MOE} {PP2} --expert-model-parallel-size 4", 4, "--expert-model-parallel-size 4 × --pipeline-model-"
                "parallel-size 2: allowed is a product that divides the role's 4 rank(s)"),
    "heads": ("--tensor-model-parallel-size 16", 16, "--num-attention-heads 8: allowed is a multiple of --tensor"),
    "groups by TP": ("--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 96 --num-query-groups 6", 4,
                     "--num-query-groups 6: allowed is a multiple of --tensor-model-parallel-size 4, or a divisor of"),
    "rows of a group": ("--tensor-model-parallel-size 8 --hidden-size 48 --num-query-groups 1", 8, "--kv-channels 6: "
                        "allowed is a size whose double is a multiple of the 8 tensor-parallel ranks of a query group"),
    "groups by heads": ("--num-query-groups 3", 1, "--num-query-groups 3: allowed is a divisor of --num-attention"),
    "width by heads": ("--hidden-size 68", 1, "--hidden-size 68: allowed is a multiple of --num-attention-heads 8"),
    "odd heads": ("--hidden-size 120", 1, "--kv-channels 15: allowed is an even number with rotary emb"),
    "vocabulary by TP": (f"{TP2} --make-vocab-size-divisible-by 33", 2, "--make-vocab-size-divisible-by 33"),
    "ffn by TP": (f"{TP2} --ffn-hidden-size 129", 2, "--ffn-hidden-size 129: allowed is a multiple of --tensor-model"),
    "first stage without PP": ("--decoder-first-pipeline-num-layers 2", 1, "--decoder-first-pipeline-num-layers 2"),
    "last stage too large": (f"{PP2} --decoder-last-pipeline-num-layers 8", 2, "--decoder-last-pipeline-num-layers 8"),
    "two ways to be uneven": (f"{PP2} --decoder-first-pipeline-num-layers 3 --account-for-loss-in-pipeline-split", 2,
                              "--account-for-loss-in-pipeline-split True: allowed is none of them with"),
    "layers by PP": ("--pipeline-model-parallel-size 3", 3, "--num-layers 8: allowed is a multiple of --pipeline-mo"),
    "layers between": (f"{PP4} --decoder-first-pipeline-num-layers 1", 4, "7 layer(s) are left for 3 stage(s)"),
    "0 layers a virtual stage": (f"{PP2} --num-layers-per-virtual-pipeline-stage 0", 2, "-virtual-pipeline-stage 0"),
    "0 virtual stages": (f"{PP2} --num-virtual-stages-per-pipeline-rank 0", 2, "-stages-per-pipeline-rank 0: allow"),
    "both virtual flags": (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
                           2, "--num-virtual-stages-per-pipeline-rank 2: allowed is one of it and"),
    "virtual without PP": ("--num-virtual-stages-per-pipeline-rank 2", 1, "--num-virtual-stages-per-pipeline-rank 2: "
                           "allowed is none with --pipeline-model-parallel-size 1"),
    "virtual and uneven": (f"{PP2} --decoder-first-pipeline-num-layers 4 --num-layers-per-virtual-pipeline-stage 2", 2,
                           "--num-layers-per-virtual-pipeline-stage 2: allowed is --num-virtual-stages"),
    "virtual by stage": (f"{PP2} --num-layers-per-virtual-pipeline-stage 3", 2, "stage 3: allowed is a divisor of th"),
    "stage by virtual": (f"{PP4} --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4"
                         " --num-virtual-stages-per-pipeline-rank 2", 4, "the layers of every stage (2, 4, 1)"),
    "EP without experts": ("--expert-model-parallel-size 2", 2, "--expert-model-parallel-size 2: allowed is 1 without"),
    "experts by EP": (f"{MOE} --expert-model-parallel-size 3", 3, "--expert-model-parallel-size 3: allowed is a divi"),
    "expert TP without experts": ("--expert-tensor-parallel-size 2", 2, "--expert-tensor-parallel-size 2: allowed is"),
    "expert TP on a CPU": (f"{MOE} --expert-tensor-parallel-size 2", 2, "--expert-tensor-parallel-size 2: allowed is 1"
                           " on a CPU"),
    "shared expert by TP": (f"{MOE} {TP2} --sequence-parallel --moe-shared-expert-intermediate-size 33", 2,
                            "--moe-shared-expert-intermediate-size 33"),
    "latents without experts": ("--moe-latent-size 16", 1, "--moe-latent-size 16: allowed is a number above 0, with"),
    "latents with biases": ("--num-experts 8 --moe-router-topk 2 --moe-latent-size 16", 1,
                            "--moe-latent-size 16: allowed is none without --disable-bias-linear"),
    "latents of no channels": (f"{MOE} --moe-latent-size 0", 1, "--moe-latent-size 0: allowed is a number above 0"),
    "more chosen than there are": (f"{MOE} --moe-router-topk 9", 1, "--moe-router-topk 9: allowed is from 1 to --num-"),
    "short pattern": (f"{MOE} --moe-layer-freq [0]*3+[1]*4", 1, "a pattern of 8 zeros and ones"),
    "router groups": (f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 1", 1, "--moe-router-num-groups 3"),
    "groups without choice": (f"{MOE} --moe-router-num-groups 4", 1, "--moe-router-group-topk None: allowed is from 1"),
    "small groups": (f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 1", 1, "--moe-router-topk 4: allowed is"
                     " a multiple of --moe-router-group-topk 1, at most 2 in each"),
    "groups with too few experts": (f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 1"
                                    " --moe-router-group-score max", 1,
                                    "--moe-router-topk 4: allowed is at most the 2 experts of"),
    "gather over replicas": (f"{MOE} --expert-model-parallel-size 4 {CP2} --moe-token-dispatcher-type allgather", 4,
                          "--moe-token-dispatcher-type allgather: allowed is alltoall, where"),
    "sinkhorn": (f"{MOE} {KIND} sinkhorn", 1, "sinkhorn: allowed is seq_aux_loss, global_aux_loss or none: others"),
    "quantiles": (f"{MOE} {KIND} seq_aux_loss quantile_balancing", 1, "seq_aux_loss quantile_balancing: allowed is"),
    "a loss twice": (f"{MOE} {KIND} seq_aux_loss seq_aux_loss {COEFF} 1 1", 1, "each name once"),
    "coefficients for losses": (f"{MOE} {KIND} seq_aux_loss none {COEFF} 0.1", 1, "-coeff 0.1: allowed is as many num"),
    "negative coefficient": (f"{MOE} {KIND} seq_aux_loss {COEFF} -1", 1, "--moe-aux-loss-coeff -1.0: allowed is 0 or"),
    "loss of micro-batches": (f"{MOE} {COEFF} 0.01", 1, "--moe-aux-loss-coeff 0.01: allowed is 0 with --moe-router-load"
                              "-balancing-type aux_loss: allowed losses are seq_aux_loss and global_aux_loss"),
    "coefficient of nothing": (f"{MOE} {KIND} seq_aux_loss none {COEFF} 0.1 0.2", 1, "coeff 0.1 0.2: allowed is 0 wit"),
    "negative z-loss": (f"{MOE} --moe-z-loss-coeff -0.1", 1, "--moe-z-loss-coeff -0.1: allowed is 0 or more"),
    "bias of a softmax": (f"{MOE} {BIAS}", 1, "-bias True: allowed is none with --moe-router-score-function softmax"),
    "negative bias rate": (f"{MOE} --moe-router-bias-update-rate -1", 1, "--moe-router-bias-update-rate -1.0"),
    "SP without TP": ("--sequence-parallel", 1, "--sequence-parallel True: allowed is none with --tensor-model-parall"),
    "experts and TP without SP": (f"{MOE} {TP2}", 2, "--tensor-model-parallel-size 2: allowed is 1 for a role"),
    "gathers later": ("--overlap-param-gather --use-distributed-optimizer", 1, "--overlap-param-gather True: weights"),
    "sharded and PP": (f"{FSDP} {PP2}", 2, "--use-torch-fsdp2 True: allowed is none with --pipeline"),
    "sharded and EP": (f"{FSDP} {MOE} --expert-model-parallel-size 2", 2, "none with --expert-model-parallel-size 2"),
    "sharded twice": (f"{FSDP} --use-distributed-optimizer", 1, "none with --use-distributed-optimizer"),
    "sharded experts and TP": (f"{FSDP} {MOE} {TP2} --sequence-parallel", 2, "none with --num-experts 8 and --tensor"),
    "WSD without its decay": ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters None: allowed is a number with --lr-d"),
    "NCCL's buffers": ("--use-nccl-ub", 1, "--use-nccl-ub True: allowed is none without CUDA"),
    "groups of micro-batches": (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-"
                                "pipeline-stage 4", 2, "-stage 4: allowed is --pipeline-model-parallel-size 2"),
    "sharded in fp16": (f"{FSDP} --fp16", 1, "--use-torch-fsdp2 True: allowed is none with --fp16"),
}  # fmt: skip
# What no CPU can be asked for, broken in a world of GPUs that is only pretended.
WRONG_ON_GPUS = {
    "expert ffn": (f"{MOE} --expert-tensor-parallel-size 2 --moe-ffn-hidden-size 33", 2, "--moe-ffn-hidden-size 33"),
    "grouped experts": (f"{GROUPED} --moe-ffn-hidden-size 36", 1, "-size 36: allowed is a multiple of 8 with --moe-gr"),
    "grouped rows": (f"{GROUPED} --hidden-size 60 --num-attention-heads 6 --num-query-groups 2", 1,
                     "--hidden-size 60: allowed is"),
    "grouped in fp32": (f"{MOE} --moe-grouped-gemm", 1, "--moe-grouped-gemm True: allowed is none without --bf16"),
}  # fmt: skip
RIGHT = [
    ("", 3), (TP2, 4), ("--tensor-model-parallel-size 8", 8), (f"{TP2} --num-query-groups 1", 2),
    ("--context-parallel-size 4", 8), (f"{TP2} --sequence-parallel --context-parallel-size 2", 4),
    (f"{PP4} --num-layers-per-virtual-pipeline-stage 1", 4), (f"{PP2} --num-virtual-stages-per-pipeline-rank 4", 2),
    ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", 3),
    (f"{PP2} --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5", 2),
    (f"{MOE} {TP2} --sequence-parallel --expert-model-parallel-size 4 --moe-layer-freq [0]*2+[1]*6", 4),
    (f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 2", 1), (FSDP, 4), (f"{FSDP} {TP2}", 4),
    ("--use-distributed-optimizer --overlap-grad-reduce", 2),
    (f"{MOE} {KIND} seq_aux_loss global_aux_loss {COEFF} 0.01 0.02 --moe-z-loss-coeff 1e-3", 1),
    (f"{MOE} {KIND} seq_aux_loss {COEFF} 0.01", 1), (f"{MOE} {KIND} none {COEFF} 0", 1),
    (f"{MOE} {KIND} global_aux_loss {COEFF} 1e-2 {BIAS} --moe-router-score-function sigmoid", 1),
    (f"{MOE} --expert-model-parallel-size 2 {CP2} --moe-token-dispatcher-type allgather", 4),
    ("--num-layers 7 --account-for-loss-in-pipeline-split " + PP2, 2),
]  # fmt: skip


found = functools.cache(lambda: refused(layout_rules, MODEL, WRONG | WRONG_ON_GPUS, WRONG_ON_GPUS))


@pytest.mark.parametrize("case", [*WRONG, *WRONG_ON_GPUS])
def test_wrong_layouts(case):
    line, needle = found().lines[case], (WRONG | WRONG_ON_GPUS)[case][2]
    assert line.startswith("actor: ") and "\n" not in line and "Megatron refuses" not in line
    assert needle in line


def test_each_rule_can_be_broken():
    """Every rule is the one that stops some case of the tables: none is covered by those before it."""
    assert found().unbroken == []


@pytest.mark.parametrize("text, ranks", RIGHT)
def test_right_layouts(text, ranks):
    assert parse(f"{MODEL} {text}".split(), ranks, "sft").roles["actor"].megatron.world_size == ranks


def test_only_trained_moe_roles_need_sequence_parallelism():
    argv = f"{MODEL} {MOE} --reference-tensor-model-parallel-size 2".split()
    assert parse(argv, 2).roles["reference"].megatron.sequence_parallel is False
    with pytest.raises(UsageError, match="critic: --tensor-model-parallel-size 2"):
        parse([*argv, "--critic-tensor-model-parallel-size", "2"], 2)


def test_fsdp_passes_although_tensor_parallelism_wants_one_launch_queue(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    argv = f"{MODEL} {FSDP} --critic-tensor-model-parallel-size 2".split()
    roles = parse(argv, 2).roles
    assert roles["actor"].megatron.use_torch_fsdp2 and roles["critic"].megatron.tensor_model_parallel_size == 2
