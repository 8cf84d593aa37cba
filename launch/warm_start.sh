#!/usr/bin/env bash
# Makes what the quickstarts and tools/curves.py start from: prompts, a tokenizer, and a policy to which supervised
# fine-tuning on two ranks taught part of the task (sums of two two-digit numbers).
#   SAVE=runs/mine bash launch/warm_start.sh [flags of megarl.train_sft]
#   SAVE=runs/mine CONFIG=moe_quickstart SEED=2 bash launch/warm_start.sh
# Writes SAVE/data (train.jsonl, heldout.jsonl, tokenizer.model) and SAVE/sft (the policy's checkpoint).
# Reads: SAVE (output folder, required); CONFIG (policy of configs/CONFIG_sft.yaml, default quickstart); SEED (random
# seed, default 1); PYTHON and MEGARL_VENV (see launch/setup_env.sh).
# Exit status: 0; 2 for wrong variables or flags; otherwise that of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
SEED=${SEED:-1}
CONFIG=${CONFIG:-quickstart}
wrong() { echo "warm_start.sh: $*" >&2 && exit 2; }
[[ -n ${SAVE:-} ]] || wrong "SAVE is not set: it is the folder for data/ and sft/"
[[ $SEED =~ ^[0-9]+$ ]] || wrong "SEED=$SEED: allowed is a whole number"
[[ -f $ROOT/configs/${CONFIG}_sft.yaml ]] || wrong "CONFIG=$CONFIG: configs/${CONFIG}_sft.yaml does not exist"
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\nwarm start: %s\n' "$*"; }

say "prompts: sums of two two-digit numbers, and a tokenizer for them"
"$PYTHON_BIN" tools/make_prompts.py --task basic_arithmetic --train 6000 --heldout 400 --seed "$SEED" \
    --out "$SAVE/data" --prompt-template '{metadata[expression]} =' \
    --task-option 'operators=["+"]' --task-option allow_parentheses=false \
    --task-option min_terms=2 --task-option max_terms=2 --task-option min_digits=2 --task-option max_digits=2 \
    --keep '^\d\d \+ \d\d =$'
"$PYTHON_BIN" tools/train_tokenizer.py --input "$SAVE/data/train.jsonl" --vocab-size 32 --out "$SAVE/data/tokenizer"

say "supervised fine-tuning on two ranks"
NPROC=2 bash launch/run.sh train_sft --config "configs/${CONFIG}_sft.yaml" --prompts "$SAVE/data/train.jsonl" \
    --eval-prompts "$SAVE/data/heldout.jsonl" --tokenizer-model "$SAVE/data/tokenizer.model" --seed "$SEED" \
    --save "$SAVE/sft" "$@"
