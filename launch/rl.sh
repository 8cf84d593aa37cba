#!/usr/bin/env bash
# Reinforcement learning of a model on a node, on several nodes, or in a Slurm job. A recipe to use or to copy: each array
# below is one concern, each variable one decision. Prints the arrays and the exact command, then starts it.
#   HF_MODEL=/models/Qwen3-8B PROMPTS=train.jsonl SAVE=runs/mine NPROC=8 TP=2 bash launch/rl.sh
#   HF_MODEL=/models/Qwen3-8B PROMPTS=train.jsonl SAVE=runs/mine TP=2 \
#       sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 launch/slurm.sh launch/rl.sh
#   DRY_RUN=1 MODEL=qwen2.5_72b NNODES=64 NPROC=8 TP=8 PP=4 bash launch/rl.sh
# Further arguments are flags of megarl.train_rl, and win over the recipe's.
# Reads, besides the variables of launch/run.sh (where and how the ranks start):
#   MODEL          shape: a file of launch/models without .sh; or
#   HF_MODEL       Hugging Face folder: shape, weights, tokenizer and chat template
#   INIT           checkpoint or run folder to start from (with MODEL; default: random weights)
#   TOKENIZER      tokenizer file (SentencePiece) or folder (Hugging Face), with MODEL
#   DTYPE          bf16 (default) or fp32 (CPUs)
#   ALGORITHM      a file of configs/recipes with an advantage, without .yaml, default grpo
#   PROMPTS, EVAL_PROMPTS, REWARD      prompt files; reward, default exact-match
#   ROLE_MAP       ranks or nodes of the roles, as "actor=nodes 0-1;reference=node 2;…"; default: all roles on all ranks
#   TP PP CP EP    tensor, pipeline, context and expert parallel sizes of all roles, default 1
#   ROLLOUT_TP ROLLOUT_PP ROLLOUT_EP   sizes of the rollout; default: it generates on the actor's own module, with its
#                  KV cache in the memory of the gradients. Other sizes: a copy of the model and a cache of its own
#   RECOMPUTE      of activations: none, selective, full, or auto (default): the first of these that fits, by the plan
#   GPU_MEMORY     GiB of a GPU, for RECOMPUTE=auto and the verdict of DRY_RUN, default 80
#   OFFLOAD        1: models wait in host memory while other roles work
#   PROMPTS_PER_STEP (128), SAMPLES_PER_PROMPT (8), MINIBATCH_SIZE (all), MAX_PROMPT_LENGTH (1024),
#   MAX_RESPONSE_LENGTH (4096), BUFFER_GB (KV cache of a rank, 8), MAX_REQUESTS (256)
#   LR (1e-6), CRITIC_LR (5e-6), TRAIN_ITERS (500), SEED (1)
#   SAVE (default runs/ALGORITHM), SAVE_INTERVAL (20), KEEP_LAST (3), EVAL_INTERVAL (10), LOAD (run to resume)
# Experts are grouped in bf16 (`--moe-grouped-gemm`), unless `--exact-rollout` is among the flags.
# Exit status: as of launch/run.sh.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
HELP_OF=train_rl
show_help "$@"
ALGORITHM=${ALGORITHM:-grpo} DTYPE=${DTYPE:-bf16}
SAVE=${SAVE:-runs/$ALGORITHM}
RECIPE=$ROOT/configs/recipes/$ALGORITHM.yaml
algorithms() { grep -l ^advantage: "$ROOT"/configs/recipes/*.yaml | sed 's|.*/||; s|\.yaml$||' | xargs; }
grep -qs ^advantage: "$RECIPE" || wrong "ALGORITHM=$ALGORITHM: allowed: $(algorithms)"
[[ $DTYPE == bf16 || $DTYPE == fp32 ]] || wrong "DTYPE=$DTYPE: allowed: bf16, fp32"
[[ -n ${MODEL:-}${HF_MODEL:-} ]] || wrong "MODEL or HF_MODEL is not set: a shape of launch/models, or a Hugging Face folder"
check_numbers TP PP CP EP PROMPTS_PER_STEP SAMPLES_PER_PROMPT MINIBATCH_SIZE MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH \
    MAX_REQUESTS TRAIN_ITERS ROLLOUT_TP ROLLOUT_PP ROLLOUT_EP GPU_MEMORY NPROC NNODES
TP=${TP:-1} PP=${PP:-1} CP=${CP:-1} EP=${EP:-1} RECOMPUTE=${RECOMPUTE:-auto}
export GPU_MEMORY=${GPU_MEMORY:-80}
[[ $RECOMPUTE =~ ^(auto|none|selective|full)$ ]] || wrong "RECOMPUTE=$RECOMPUTE: allowed: auto, none, selective, full"

if [[ -n ${HF_MODEL:-} ]]; then
    MODEL_ARGS=(--hf-model "$HF_MODEL")
else
    shape=$ROOT/launch/models/$MODEL.sh
    [[ -f $shape ]] || wrong "MODEL=$MODEL: allowed: $(names launch/models .sh)"
    source "$shape"
    export VOCAB_SIZE
    [[ -z ${TOKENIZER:-} ]] || MODEL_ARGS+=(--tokenizer-model "$TOKENIZER")
    [[ ! -d ${TOKENIZER:-} ]] || MODEL_ARGS+=(--tokenizer-type HuggingFaceTokenizer --chat-template tokenizer)
    [[ -z ${INIT:-} ]] || MODEL_ARGS+=(--pretrained-checkpoint "$INIT")
fi
if [[ $DTYPE == bf16 ]]; then
    MODEL_ARGS+=(--bf16)
    names='"(num_experts|num_local_experts|n_routed_experts)"'
    has_experts=$(grep -sE "$names: *[1-9]" "${HF_MODEL:-}/config.json" || true)
    [[ " ${MODEL_ARGS[*]} " != *" --num-experts "* ]] || has_experts=1
    # Its experts must not depend on the batch.
    [[ -z $has_experts || " $* " == *" --exact-rollout"* ]] || MODEL_ARGS+=(--moe-grouped-gemm)
fi

ROLE_ARGS=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --use-distributed-optimizer
)
[[ $TP == 1 ]] || ROLE_ARGS+=(--sequence-parallel)
[[ -z ${ROLE_MAP:-} ]] || ROLE_ARGS+=(--role-map "$ROLE_MAP")
[[ -z ${OFFLOAD:-} ]] || ROLE_ARGS+=(--offload)

ROLLOUT_ARGS=(
    --reward "${REWARD:-exact-match}"
    --prompts-per-step "${PROMPTS_PER_STEP:-128}" --samples-per-prompt "${SAMPLES_PER_PROMPT:-8}"
    --max-prompt-length "${MAX_PROMPT_LENGTH:-1024}" --max-response-length "${MAX_RESPONSE_LENGTH:-4096}"
    --rollout-buffer-gb "${BUFFER_GB:-8}" --rollout-max-requests "${MAX_REQUESTS:-256}" --rollout-prefix-caching
)
[[ -z ${ROLLOUT_TP:-} ]] || ROLLOUT_ARGS+=(--rollout-tensor-model-parallel-size "$ROLLOUT_TP")
[[ -z ${ROLLOUT_PP:-} ]] || ROLLOUT_ARGS+=(--rollout-pipeline-model-parallel-size "$ROLLOUT_PP")
[[ -z ${ROLLOUT_EP:-} ]] || ROLLOUT_ARGS+=(--rollout-expert-model-parallel-size "$ROLLOUT_EP")
[[ -z ${PROMPTS:-} ]] || ROLLOUT_ARGS+=(--prompts "$PROMPTS")
[[ -z ${EVAL_PROMPTS:-} ]] || ROLLOUT_ARGS+=(--eval-prompts "$EVAL_PROMPTS" --eval-interval "${EVAL_INTERVAL:-10}")

ALGORITHM_ARGS=(--config "$RECIPE")
[[ -z ${MINIBATCH_SIZE:-} ]] || ALGORITHM_ARGS+=(--minibatch-size "$MINIBATCH_SIZE")
# The experts that the rollout chose are those that are trained.
[[ $EP == 1 && " $* " != *" --expert-model-parallel-size "* ]] || ALGORITHM_ARGS+=(--router-replay rollout)

OPTIMIZER_ARGS=(
    --lr "${LR:-1e-6}" --lr-warmup-iters 10 --lr-decay-style constant --weight-decay 0.0 --adam-beta2 0.98
    --clip-grad 1.0
)
if [[ $ALGORITHM == ppo ]]; then OPTIMIZER_ARGS+=(--critic-lr "${CRITIC_LR:-5e-6}"); fi

SAVE_ARGS=(
    --train-iters "${TRAIN_ITERS:-500}" --seed "${SEED:-1}" --save "$SAVE" --save-interval "${SAVE_INTERVAL:-20}"
    --async-save --keep-last "${KEEP_LAST:-3}"
)
[[ -z ${LOAD:-} ]] || SAVE_ARGS+=(--load "$LOAD")

declare -A RECOMPUTE_FLAGS=(
    [none]="" [selective]="--recompute-granularity selective"
    [full]="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
if [[ " $* " == *" --recompute-granularity"* || " $* " == *" --best-layouts"* ]]; then
    recompute= # the given flags are used; a search for layouts adds its own
elif [[ $RECOMPUTE == auto ]]; then
    fits=1
    recompute=$(least_recompute "${MODEL_ARGS[@]}" "${ROLE_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGORITHM_ARGS[@]}" \
        "${OPTIMIZER_ARGS[@]}" "${SAVE_ARGS[@]}" "$@") || fits=
    # Python also ends with status 1 after an error of its own.
    [[ $recompute == "recompute:"* ]] || exit 2
    recompute=${recompute#recompute:}
    help="DRY_RUN=1 says"
    [[ -z ${DRY_RUN:-} ]] || help="the end of the plan below says"
    [[ -n $fits ]] || echo "$SCRIPT: the plan does not fit into GPU_MEMORY=$GPU_MEMORY GiB even with RECOMPUTE=full;" \
        "$help what would help" >&2
else
    recompute=${RECOMPUTE_FLAGS[$RECOMPUTE]}
fi
# shellcheck disable=SC2206  # words
OPTIMIZER_ARGS+=($recompute)

start train_rl MODEL_ARGS ROLE_ARGS ROLLOUT_ARGS ALGORITHM_ARGS OPTIMIZER_ARGS SAVE_ARGS -- "$@"
