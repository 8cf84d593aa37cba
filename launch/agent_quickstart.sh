#!/usr/bin/env bash
# Trains a small agent from nothing, without a GPU: makes prompts, a tokenizer and a warm start, a policy that knows the
# form of a turn and little else, then trains on two ranks with an environment that answers its turns.
#   bash launch/agent_quickstart.sh [flags of megarl.train_rl]
#   TASK=products bash launch/agent_quickstart.sh
#   ENVIRONMENT=guess-number-blind bash launch/agent_quickstart.sh
# Reads: TASK (guess-number, the default: find a number of 1 to 15 in four turns by the answers higher and lower;
# products: multiply with a calculator; frozen-lake: cross a lake without falling into a hole); ENVIRONMENT (another
# environment for the task's prompts, such as its control: guess-number-blind, whose answers say nothing, or
# calculator-offset, whose results are too large); SEED (random seed, default 1); SAVE (output folder, default
# runs/agent_quickstart, runs/agent_products or runs/agent_frozen_lake); PYTHON and MEGARL_VENV (see
# launch/setup_env.sh).
# An existing folder SAVE is renamed, never overwritten. Exit status: 0; 2 for wrong variables or flags; otherwise that
# of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
SEED=${SEED:-1} TASK=${TASK:-guess-number}
wrong() { echo "agent_quickstart: $*" >&2 && exit 2; }
[[ $SEED =~ ^[0-9]+$ ]] || wrong "SEED=$SEED: allowed is a whole number"
case $TASK in
    guess-number)
        name=agent_quickstart
        prompts=(--train 2048 --heldout 512 --conversations 4000 --prompt guess)
        vocabulary=40
        ;;
    products)
        name=agent_products
        prompts=(--train 4000 --heldout 256 --conversations 6000 --prompt '{}')
        vocabulary=112
        ;;
    frozen-lake)
        name=agent_frozen_lake
        prompts=(--train 2048 --heldout 64 --conversations 3000 --prompt go --standard-map)
        vocabulary=64
        ;;
    *) wrong "TASK=$TASK: allowed: guess-number, products, frozen-lake" ;;
esac
SAVE=${SAVE:-runs/$name}
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

say "prompts of $TASK, conversations of careless players, and a tokenizer for them"
"$PYTHON_BIN" tools/make_agent_prompts.py --task "$TASK" "${prompts[@]}" --seed "$SEED" --out "$SAVE/data"
"$PYTHON_BIN" tools/train_tokenizer.py --input "$SAVE/data/conversations.jsonl" --vocab-size "$vocabulary" \
    --special '<|user|>' '<|assistant|>' '<|tool|>' --out "$SAVE/data/tokenizer"

files=(--tokenizer-model "$SAVE/data/tokenizer.model" --seed "$SEED")
say "supervised fine-tuning on two ranks: the form of a turn"
talks=$SAVE/data/conversations.jsonl
NPROC=2 bash launch/run.sh train_sft --config "configs/${name}_sft.yaml" --prompts "$talks" --eval-prompts "$talks" \
    "${files[@]}" --save "$SAVE/sft"

say "reinforcement learning on two ranks"
NPROC=2 bash launch/run.sh train_rl --config "configs/$name.yaml" ${ENVIRONMENT:+--environment "$ENVIRONMENT"} \
    --prompts "$SAVE/data/train.jsonl" --eval-prompts "$SAVE/data/heldout.jsonl" "${files[@]}" \
    --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/rl" "$@"

say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s: $SAVE/rl/report.png, $SAVE/rl/report.html"
