"""Flags of parallel layouts, and the layouts in which every update must be the same."""

DENSE = "--num-layers 4 --adam-eps 1 --lr 0.05 --weight-decay 0.1 --clip-grad 1"  # no division by tiny second moments
MOE = f"{DENSE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq ([0]+[1]*3)"
WINDOW = "--window-size 5,0 --window-attn-skip-freq 2"
OLMO = f"{DENSE} {WINDOW} --layernorm-position post --qk-layernorm-all-heads"
GEMMA = (
    f"{DENSE} {WINDOW} --layernorm-position sandwich --apply-layernorm-1p --qk-layernorm --embedding-multiplier 8"
    " --attn-logit-softcapping 2 --final-logit-softcapping 5 --query-pre-attn-scalar 24 --softmax-type learnable"
)
TP2, SP, PP2 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
TP4, GROUP = "--tensor-model-parallel-size 4", "--num-query-groups 1"
ONE_GROUP = f"{DENSE} {GROUP}"
CP2, EP2 = "--context-parallel-size 2", "--expert-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VP2, FSDP = "--num-layers-per-virtual-pipeline-stage 1", "--use-torch-fsdp2"
LAYOUTS = {
    "tp2": (2, DENSE, TP2),
    "tp2-sp": (2, DENSE, f"{TP2} {SP}"),
    "pp2": (2, DENSE, PP2),
    "pp2-vp2": (2, DENSE, f"{PP2} {VP2}"),
    "one": (1, DENSE, ""),
    "dp2": (2, DENSE, ""),
    "dp4": (4, DENSE, ""),
    "cp2": (2, DENSE, CP2),
    "tp2-pp2": (4, DENSE, f"{TP2} {PP2}"),
    "tp2-cp2": (4, DENSE, f"{TP2} {CP2}"),
    "tp2-sp-cp2": (4, DENSE, f"{TP2} {SP} {CP2}"),
    "pp2-cp2": (4, DENSE, f"{PP2} {CP2}"),
    "dp2-distributed-optimizer": (2, DENSE, "--use-distributed-optimizer"),
    "dp2-overlap": (2, DENSE, "--use-distributed-optimizer --overlap-grad-reduce"),
    "pp2-vp2-overlap": (4, DENSE, f"{PP2} {VP2} --use-distributed-optimizer --overlap-grad-reduce"),
    "tp2-sp-recompute": (2, DENSE, f"{TP2} {SP} {RECOMPUTE}"),
    "pp2-cp2-recompute": (4, DENSE, f"{PP2} {CP2} --recompute-activations"),
    "sharded-dp2": (2, DENSE, FSDP),
    "tp2-sp-sharded-dp2": (4, DENSE, f"{TP2} {SP} {FSDP}"),
    "sharded-dp3": (3, DENSE, FSDP),  # which divide no matrix
    "sharded-dp4": (4, DENSE, FSDP),
    "sharded-cp2": (2, DENSE, f"{CP2} {FSDP}"),
    "tp2-sharded-dp2": (4, DENSE, f"{TP2} {FSDP}"),
    "sharded-dp2-recompute": (2, DENSE, f"{RECOMPUTE} {FSDP}"),
    "sharded-dp2-untied": (2, f"{DENSE} --untie-embeddings-and-output-weights", FSDP),
    "sharded-dp2-clipped": (2, f"{DENSE} --clip-grad 0.01", FSDP),
    "tp2-olmo": (2, OLMO, TP2),
    "pp2-cp2-olmo": (4, OLMO, f"{PP2} {CP2}"),
    "tp2-sp-gemma": (2, GEMMA, f"{TP2} {SP}"),
    "pp2-cp2-gemma": (4, GEMMA, f"{PP2} {CP2}"),
    "tp2-ep2-sp": (4, MOE, f"{TP2} {SP} {EP2}"),
    # Ranks share a query group; with four of one group a rank has no row of the queries.
    "tp2-one-group": (2, ONE_GROUP, TP2),
    "tp4-two-groups": (4, DENSE, TP4),
    "tp4-sp-two-groups": (4, DENSE, f"{TP4} {SP}"),
    "tp4-sp-one-group": (4, ONE_GROUP, f"{TP4} {SP}"),
    "tp2-sp-cp2-one-group": (4, f"{ONE_GROUP} --add-qkv-bias", f"{TP2} {SP} {CP2}"),
    "tp2-pp2-recompute-one-group": (4, ONE_GROUP, f"{TP2} {PP2} {RECOMPUTE}"),
    "tp2-sharded-dp2-one-group": (4, ONE_GROUP, f"{TP2} {FSDP}"),
    "tp4-olmo": (4, OLMO, TP4),
    "tp2-sp-gemma-one-group": (2, f"{GEMMA} {GROUP}", f"{TP2} {SP}"),
    "tp4-sp-gemma": (4, GEMMA, f"{TP4} {SP}"),
    "tp4-ep2-sp": (4, MOE, f"{TP4} {SP} {EP2}"),
}
ALL_MODELS = "tp2 tp2-sp pp2-vp2 cp2 dp2-overlap sharded-dp2 tp2-sp-recompute pp2-cp2-recompute tp2-ep2-sp".split()
# Of models with recurrent states.
RECURRENT_LAYOUTS = {name: LAYOUTS[name] for name in (*ALL_MODELS, "tp2-one-group", "tp2-pp2", "sharded-cp2")}
# Of models with multi-latent attention.
LATENT_LAYOUTS = {name: LAYOUTS[name] for name in (*ALL_MODELS, "tp2-sp-cp2")} | {"tp4-sp": (4, DENSE, f"{TP4} {SP}")}
