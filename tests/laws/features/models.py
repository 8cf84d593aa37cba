"""What is trained and beside it: averages, drafts, references, optimizers, factors."""

import functools

from tests.helpers.pages.combinations import EXPERTS, LATENT, RECURRENT
from tests.helpers.programs import GRADED
from tests.laws.features.feature import (
    AHEAD,
    ALL_AHEAD,
    BALANCED,
    CP2,
    EP2,
    EVALUATED,
    FACTORS,
    GRPO,
    PARTIAL,
    PP2,
    ROLLOUT_APART,
    SHARDED,
    SMALL,
    TP2,
    TP2_SEQUENCE,
    TURNS,
    TWO,
    Feature,
)
from tests.laws.plug_ins import KEYS, check_choice, check_refresh

EMA = f"{GRPO} {GRADED} --ema-decay 0.7 --lr 3e-3 --keep-best false {EVALUATED} --evaluate-ema"
MTP = f"{GRPO} {GRADED} --lr 3e-3 --mtp-drafts --mtp-train"
REFRESH = f"{GRADED} --reference-update-interval 2 --lr-decay-iters 9 --lr 3e-3"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
REFERENCE_APART = "--role-map actor=0;critic=0;reward=0;reference=1"
FROZEN = "--freeze embedding.* *.layers.0.*"
RATES = "--lr-multipliers *.mlp.*=0.5 --weight-decay-multipliers *.mlp.*=3"
FEW_BITS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
LORA = f"{GRADED} --lora-rank 2 --lora-alpha 8 --lr 1e-2 --critic-lr 2e-2 --ppo-epochs 2"
SHARDED_FACTORS = (f"{LORA} --actor-use-torch-fsdp2 --critic-use-torch-fsdp2 --reference-use-torch-fsdp2"
                   " --verify-weights")  # fmt: skip


# A policy, reference and critic of transformers' modules: with a tied head, windows, softcaps; with experts.
MODULES = f"--hf-model {{gemma2}} --model-source transformers {GRADED} --lr 1e-4 --critic-lr 1e-3"
MODULES_APART = (4, "--role-map actor=0-1;critic=2;reward=3;reference=3 --actor-tensor-model-parallel-size 2")
FSDP, TP2_FSDP = (2, "--use-torch-fsdp2"), (4, f"{TP2[1]} --use-torch-fsdp2")


def _of_modules(flags: str = "", ranks: int = 1, **more) -> Feature:
    return Feature(f"{MODULES} {flags}", ranks, warm_start=False, **{"steps": 4, "tolerance": 1e-5, **more})


def _averaged(flags: str, ranks: int = 1, **more) -> Feature:
    return Feature(f"{EMA} {flags}", ranks, steps=4, warm_start="experts" not in flags, **more)


def _drafted(flags: str = "", ranks: int = 1, **more) -> Feature:
    return Feature(f"{MTP} {flags}", ranks, steps=4, warm_start=not ("experts" in flags or RECURRENT in flags), **more)


def _refreshed(flags: str = "", ranks: int = 1, **more) -> Feature:
    warm_start = "experts" not in flags
    return Feature(f"{REFRESH} {flags}", ranks, steps=5, resumed=3, warm_start=warm_start, check=check_refresh, **more)


CHOICE = f"{LATENT} --dsa-indexer-topk {KEYS} --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 16"
SHARED_CHOICE = f"{CHOICE} --num-layers 4 --dsa-indexer-layers 1,0,1,0"
SOME = "--max-response-length 60 --max-tokens-per-microbatch 200 --prompts-per-step 4 --minibatch-size 4"


def _chosen(flags: str = "", ranks: int = 1, choice: str = CHOICE, **more) -> Feature:
    """Random weights, of which a step at a small rate changes few tokens; PPO has a reference and a critic."""
    check = functools.partial(check_choice, has_stale_tokens="correction" in flags)
    more = {"check": check, "tolerance": 1e-4, **more}
    return Feature(f"{GRADED} --lr 1e-4 {choice} {flags}", ranks, warm_start=False, **more)


def _optimized(program: str, flags: str, ranks: int = 1, needs: str = "") -> Feature:
    flags = f"--lr-warmup-iters 0 {flags}"
    return Feature(flags, ranks, program, resumed=1, warm_start="experts" not in flags, needs=needs)


MODELS = {
    "average": _averaged("", moved=(TP2, PP2, (2, "--use-torch-fsdp2"))),
    "average of factors": _averaged(FACTORS), "average in bf16": _averaged("--bf16"),
    "average, tensor": _averaged(TP2[1], 2), "average, FSDP": _averaged("--use-torch-fsdp2", 2),
    "average of experts": _averaged(f"{BALANCED} {EP2}", 2),
    "average, a lag": _averaged(f"{ALL_AHEAD} --verify-weights", 2),
    "drafts": _drafted(layouts=(TP2_SEQUENCE, CP2, (2, "--actor-offload"), (2, f"{ROLLOUT_APART} --verify-weights")),
                       moved=(TP2_SEQUENCE,), numbers=2, tolerance=1e-4),
    "drafts in bf16": _drafted("--bf16"), "drafts, recurrent": _drafted(RECURRENT),
    "drafts, tensor": _drafted(f"{TP2_SEQUENCE[1]} --use-distributed-optimizer", 2),
    "drafts of experts": _drafted(f"{BALANCED} --overlap-grad-reduce --use-distributed-optimizer", 2),
    "drafts of experts of two ranks": _drafted(f"{EXPERTS} {EP2}", 2), "drafts, a lag": _drafted(ALL_AHEAD, 2),
    "refresh": _refreshed(layouts=((2, REFERENCE_APART), (1, "--reference-offload --actor-offload")), tolerance=0,
                          texts=5),
    "refresh of other ranks": _refreshed(REFERENCE_APART, 2),
    "refresh ahead": _refreshed(f"--role-map actor=0;critic=0;reward=1;reference=2;rollout=1 {AHEAD}", 3),
    "refresh of factors": _refreshed(FACTORS), "refresh in bf16": _refreshed(f"--bf16 {REFERENCE_APART}", 2),
    "refresh of factors elsewhere": _refreshed(f"--lora-rank 4 {REFERENCE_APART}", 2),
    "refresh, offload": _refreshed("--reference-offload --actor-offload"),
    "refresh of experts": _refreshed(f"{BALANCED} {REFERENCE_APART}", 2), "refresh, stages": _refreshed(PP2[1], 2),
    "refresh, tensor": _refreshed(TP2_SEQUENCE[1], 2), "refresh, FSDP": _refreshed("--use-torch-fsdp2", 2),
    "refresh, sharded": _refreshed(
        "--use-distributed-optimizer --role-map actor=0-1;critic=0-1;reward=0-1;reference=1", 2),
    "refresh, other stages": _refreshed("--role-map actor=0;critic=0;reward=0;reference=1-2"
                                        " --reference-pipeline-model-parallel-size 2", 3),
    "frozen, rates, sgd": _optimized(
        "rl", f"{FROZEN} {RATES} --critic-optimizer sgd --critic-lr 0.1 --ema-decay 0.5"),
    "sgd": _optimized("sft", f"--optimizer sgd --lr 0.1 {RATES}"),
    "frozen, sharded sgd": _optimized(
        "sft", f"{FROZEN} --optimizer sgd --bf16 --lr 0.1 --use-distributed-optimizer", 2),
    "frozen, FSDP": _optimized("reward", f"{FROZEN} --use-torch-fsdp2", 2),
    "frozen, pairs": _optimized("preference", FROZEN),
    "few bits, offload": _optimized("rl", f"{FEW_BITS} --critic-offload --actor-offload --ema-decay 0.5 --bf16"),
    "few bits of factors": _optimized("sft", f"{FEW_BITS} --use-distributed-optimizer --lora-rank 2", 2),
    "few bits, FSDP": _optimized("rl", f"{FEW_BITS} --use-torch-fsdp2 --critic-exp-avg-sq-dtype fp32", 2),
    "frozen experts": _optimized("rl", f"{FROZEN} {EXPERTS} {EP2} --actor-offload --bf16 --mtp-train --mtp-drafts", 2),
    "muon": _optimized("rl", f"--optimizer muon --critic-optimizer adam {FROZEN} --ema-decay 0.5 --offload",
                       needs="emerging_optimizers"),
    "muon of two ranks": _optimized("sft", "--optimizer dist_muon --bf16", 2, "emerging_optimizers"),
    "muon of experts": _optimized(
        "rl", f"--optimizer muon {EXPERTS} --mtp-train --mtp-drafts {EP2} --use-distributed-optimizer"
        " --moe-router-enable-expert-bias --moe-router-score-function sigmoid", 2, "emerging_optimizers"),
    "experts alone": _optimized(  # the optimizer of the other parameters has none
        "rl", f"{FROZEN} *self_attention* *norm* *router* {EXPERTS} {EP2} --use-distributed-optimizer", 2),
    "factors in another layout": Feature(LORA, steps=2, resumed=1, moved=(TP2_SEQUENCE,)),
    "factors": Feature(LORA, steps=2, resumed=1, tolerance=0, texts=2, layouts=(
        (2, REFERENCE_APART), (1, "--offload"), (1, "--offload --critic-lora-rank 2 --actor-offload --critic-offload"),
        (1, FULL))),
    "factors in bf16": Feature(f"{LORA} --bf16", steps=2, resumed=1, tolerance=0, texts=2, layouts=(
        (2, "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1 --verify-weights"),)),
    "modules": _of_modules(
        layouts=(TWO, SHARDED, FSDP, TP2, CP2, TP2_FSDP, MODULES_APART, (1, SMALL), (1, FULL)),
        moved=(TWO, TP2, FSDP)),
    "modules, sharded": _of_modules(SHARDED[1], 2), "modules, FSDP": _of_modules(FSDP[1], 2),
    "modules, tensor": _of_modules(TP2[1], 2, steps=3, moved=((1, "--tensor-model-parallel-size 1"),)),
    "modules, tensor, FSDP": _of_modules(TP2_FSDP[1], 4),
    "modules in bf16": _of_modules("--bf16 --attention-backend eager"),
    "modules of experts": _of_modules("--hf-model {qwen3_moe}", layouts=(TWO, FSDP, TP2, CP2)),
    "modules of unlike layers": _of_modules("--hf-model {gemma4_text} --speculative-rollout"
                                            " --rollout-prefix-caching", layouts=(FSDP,),
                                             tolerance=2e-5),  # 1 − 1.4, the critic's explained variance
    "modules with states": _of_modules("--hf-model {bamba} --speculative-rollout --rollout-prefix-caching",
                                       layouts=(TWO, FSDP, TP2, CP2, (1, SMALL), (1, FULL)), moved=(FSDP, CP2),
                                       tolerance=1e-4),
    "modules with states in bf16": _of_modules("--hf-model {bamba} --bf16"),
    "modules with convolutions and experts, FSDP": _of_modules(f"--hf-model {{lfm2_moe}} {FSDP[1]}", 2),
    "modules, a lag": _of_modules(f"{ALL_AHEAD} --advantage grpo --kl-coefficient 0 --verify-weights", 2),
    "modules, frozen": _of_modules("--freeze *embed_tokens* --lr-multipliers *self_attn*=0.5 --ema-decay 0.5"),
    "modules, the critic of Megatron's layers": _of_modules("--critic-model-source megatron"),
    "modules, the critic alone": _of_modules("--model-source megatron --critic-model-source transformers",
                                             layouts=((2, "--critic-tensor-model-parallel-size 2"),)),
    "chosen keys": _chosen("--critic-lr 1e-3", moved=(TP2_SEQUENCE, PP2), layouts=(
        TWO, TP2_SEQUENCE, CP2, PP2, FSDP, SHARDED, (1, SMALL), (1, FULL), (1, "--offload"))),
    "chosen keys that layers share": _chosen(choice=SHARED_CHOICE, layouts=(PP2, TP2_SEQUENCE, CP2, (1, FULL))),
    "chosen keys of experts": _chosen(f"{EXPERTS} --router-replay rollout", layouts=((2, EP2),)),
    "chosen keys, a lag": _chosen(f"{GRPO} {ALL_AHEAD} --verify-weights", 2),
    "chosen keys, a rollout apart": _chosen(f"{GRPO} {ROLLOUT_APART} --verify-weights", 2),
    "chosen keys, partial rollouts": _chosen(f"{GRPO} {SOME} {PARTIAL} --rollout-prefix-caching"),
    "chosen keys of factors": _chosen("--lora-rank 2 --lora-alpha 8", layouts=(TP2_SEQUENCE,)),
    "chosen keys of factors in bf16": _chosen("--lora-rank 4 --lora-alpha 32 --lr 1e-2 --bf16", steps=2, resumed=1),
    "chosen keys in turns": _chosen(f"{GRPO} {TURNS}"),
    "chosen keys of a teacher": _chosen("--advantage grpo --distill loss --teacher ema --ema-decay 0.5",
                                        layouts=(TP2_SEQUENCE,)),
    "chosen keys, drafts": _chosen(f"{GRPO} --speculative-rollout --rollout-chunked-prefill --rollout-prefix-caching"),
    "chosen keys, drafts of a layer": _chosen(f"{GRPO} --mtp-drafts --mtp-train --lr 3e-3", layouts=(TP2_SEQUENCE,)),
    "factors, FSDP": Feature(SHARDED_FACTORS, 2, steps=2, resumed=1),
    "factors in bf16, FSDP": Feature(f"{SHARDED_FACTORS} --bf16", 2, steps=2, resumed=1),
}  # fmt: skip
