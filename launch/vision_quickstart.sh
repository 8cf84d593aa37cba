#!/usr/bin/env bash
# Trains a small vision-language policy with GRPO, without a GPU or a download: it draws pictures of two-digit numbers,
# makes a model of the shape of Qwen3-VL with transformers' own classes, teaches it a part of the task with supervised
# fine-tuning, then trains it with rewards. Prints the accuracy on held-out pictures before and after GRPO.
#   bash launch/vision_quickstart.sh [flags of megarl.train_rl]
#   SEED=2 bash launch/vision_quickstart.sh
#   SHUFFLE=1 SAVE=runs/control bash launch/vision_quickstart.sh
# Reads: SEED (random seed, default 1); SAVE (output folder, default runs/vision_quickstart); SHUFFLE (1: the control,
# whose training lines have each other's pictures, from which nothing can be learned); PYTHON and MEGARL_VENV (see
# launch/setup_env.sh). An existing folder SAVE is renamed, never overwritten. Exit status: 0; 2 for wrong variables or
# flags; otherwise that of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
SEED=${SEED:-1}
SAVE=${SAVE:-runs/vision_quickstart}
SHUFFLE=${SHUFFLE:-0}
wrong() { echo "vision_quickstart: $*" >&2 && exit 2; }
[[ $SEED =~ ^[0-9]+$ ]] || wrong "SEED=$SEED: allowed is a whole number"
shuffle=() short=() shorter=()
case $SHUFFLE in
    0) ;;
    1) shuffle=(--shuffle) short=(--train-iters 100) shorter=(--train-iters 20) ;;
    *) wrong "SHUFFLE=$SHUFFLE: allowed is 0 or 1" ;;
esac
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\nvision_quickstart: %s\n' "$*"; }
if [[ -e $SAVE ]]; then
    number=1
    while [[ -e $SAVE.old-$number ]]; do number=$((number + 1)); done
    mv -- "$SAVE" "$SAVE.old-$number"
    echo "vision_quickstart: the earlier run is now in $SAVE.old-$number"
fi
data=(--prompts "$SAVE/data/train.jsonl" --eval-prompts "$SAVE/data/heldout.jsonl" --hf-model "$SAVE/data/model")

say "pictures of two-digit numbers, and a model with random weights"
"$PYTHON_BIN" tools/make_number_pictures.py --seed "$SEED" --out "$SAVE/data" "${shuffle[@]}"

say "supervised fine-tuning on two ranks"
NPROC=2 bash launch/run.sh train_sft --config configs/vision_quickstart_sft.yaml "${data[@]}" --seed "$SEED" \
    --save "$SAVE/sft" "${short[@]}"

say "GRPO on two ranks"
NPROC=2 bash launch/run.sh train_rl --config configs/vision_quickstart.yaml "${data[@]}" --seed "$SEED" \
    --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/grpo" "${shorter[@]}" "$@"

say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s: $SAVE/grpo/report.png, $SAVE/grpo/report.html"
