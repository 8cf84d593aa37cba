#!/usr/bin/env bash
# From nothing to a policy that PPO improved, on a machine without a GPU: environment, prompts, tokenizer, warm start,
# PPO with four roles on four ranks. Prints held-out exact-match accuracy before and after PPO.
#   bash launch/quickstart.sh [flags of megarl.train_rl]
#   SEED=2 bash launch/quickstart.sh
# Reads: SEED (default 1), SAVE (folder of everything, default runs/quickstart), PYTHON and MEGARL_VENV (environment).
# A folder SAVE that already holds a run is moved aside, never overwritten. Exit status 0, or that of what failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
cd "$ROOT"
SEED=${SEED:-1}
SAVE=${SAVE:-runs/quickstart}
[[ $SEED =~ ^[0-9]+$ ]] || { echo "quickstart: SEED=$SEED: allowed is a whole number" >&2; exit 2; }

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\nquickstart: %s\n' "$*"; }
if [[ -e $SAVE ]]; then
    number=1
    while [[ -e $SAVE.old-$number ]]; do number=$((number + 1)); done
    mv -- "$SAVE" "$SAVE.old-$number"
    echo "quickstart: the earlier run is now in $SAVE.old-$number"
fi

say "prompts: sums of two numbers below 100, and a tokenizer for them"
"$PYTHON_BIN" tools/make_prompts.py --task basic_arithmetic --train 4000 --heldout 400 --seed "$SEED" \
    --out "$SAVE/data" --prompt-template '{metadata[expression]} =' \
    --task-option 'operators=["+"]' --task-option allow_parentheses=false \
    --task-option min_terms=2 --task-option max_terms=2 --task-option min_digits=1 --task-option max_digits=2
"$PYTHON_BIN" tools/train_tokenizer.py --input "$SAVE/data/train.jsonl" --vocab-size 32 --out "$SAVE/data/tokenizer"

data=(--prompts "$SAVE/data/train.jsonl" --eval-prompts "$SAVE/data/heldout.jsonl"
    --tokenizer-model "$SAVE/data/tokenizer.model" --seed "$SEED")
# Actor on two ranks with tensor parallelism, critic on one, reward and reference together on the last.
roles=(--role-map "actor=0-1;critic=2;reward=3;reference=3" --actor-tensor-model-parallel-size 2)

say "warm start: supervised fine-tuning on two ranks"
NPROC=2 bash launch/run.sh train_sft --config configs/quickstart_sft.yaml "${data[@]}" --save "$SAVE/sft"

say "PPO: actor on ranks 0-1, critic on rank 2, reward and reference on rank 3"
NPROC=4 bash launch/run.sh train_rl --config configs/quickstart.yaml "${data[@]}" "${roles[@]}" \
    --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/ppo" "$@"

say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s: $SAVE/ppo/report.png, $SAVE/ppo/report.html"
