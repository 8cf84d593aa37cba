#!/usr/bin/env bash
# Trains a small agent with PPO from nothing, without a GPU: it learns to guess a number of 1 to 15 in four turns from
# the answers higher and lower. Makes the environment, prompts, a tokenizer and a warm start, then trains on two ranks.
#   bash launch/agent_quickstart.sh [flags of megarl.train_rl]
#   ENVIRONMENT=guess-number-blind bash launch/agent_quickstart.sh
# Reads: ENVIRONMENT (guess-number; guess-number-blind answers every guess alike: then no policy finds more than 4 of 15
# numbers); SEED (random seed, default 1); SAVE (output folder, default runs/agent_quickstart); PYTHON and MEGARL_VENV
# (see launch/setup_env.sh).
# An existing folder SAVE is renamed, never overwritten. Exit status: 0; 2 for wrong variables or flags; otherwise that
# of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
SEED=${SEED:-1} ENVIRONMENT=${ENVIRONMENT:-guess-number} SAVE=${SAVE:-runs/agent_quickstart}
wrong() { echo "agent_quickstart: $*" >&2 && exit 2; }
[[ $SEED =~ ^[0-9]+$ ]] || wrong "SEED=$SEED: allowed is a whole number"
case $ENVIRONMENT in
    guess-number | guess-number-blind) ;;
    *) wrong "ENVIRONMENT=$ENVIRONMENT: allowed: guess-number, guess-number-blind" ;;
esac
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\nagent quickstart: %s\n' "$*"; }
if [[ -e $SAVE ]]; then
    number=1
    while [[ -e $SAVE.old-$number ]]; do number=$((number + 1)); done
    mv -- "$SAVE" "$SAVE.old-$number"
    echo "agent_quickstart: the earlier run is now in $SAVE.old-$number"
fi

say "prompts, conversations of players who guess at random, and a tokenizer for them"
"$PYTHON_BIN" tools/make_agent_prompts.py --task guess-number --train 2048 --heldout 512 --conversations 4000 \
    --prompt guess --seed "$SEED" --out "$SAVE/data"
"$PYTHON_BIN" tools/train_tokenizer.py --input "$SAVE/data/conversations.jsonl" --vocab-size 40 \
    --special '<|user|>' '<|assistant|>' --out "$SAVE/data/tokenizer"

files=(--tokenizer-model "$SAVE/data/tokenizer.model" --seed "$SEED")
say "supervised fine-tuning on two ranks: the form of a guess"
NPROC=2 bash launch/run.sh train_sft --config configs/agent_quickstart_sft.yaml \
    --prompts "$SAVE/data/conversations.jsonl" "${files[@]}" --save "$SAVE/sft"

say "PPO on two ranks, with $ENVIRONMENT"
NPROC=2 bash launch/run.sh train_rl --config configs/agent_quickstart.yaml --environment "$ENVIRONMENT" \
    --prompts "$SAVE/data/train.jsonl" --eval-prompts "$SAVE/data/heldout.jsonl" "${files[@]}" \
    --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/ppo" "$@"

say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s: $SAVE/ppo/report.png, $SAVE/ppo/report.html"
