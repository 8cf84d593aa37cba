#!/usr/bin/env bash
# Trains a small policy with PPO from nothing, without a GPU: environment, prompts, tokenizer, warm start, then PPO with
# four roles on four ranks. Prints the exact-match accuracy on held-out prompts before and after PPO.
#   bash launch/quickstart.sh [flags of megarl.train_rl]
#   SEED=2 bash launch/quickstart.sh
# Reads: SEED (random seed, default 1); CONFIG (config files: quickstart, moe_quickstart or hybrid_quickstart, default
# quickstart); SAVE (output folder, default runs/CONFIG); PYTHON and MEGARL_VENV (see launch/setup_env.sh).
# An existing folder SAVE is renamed, never overwritten. Exit status: 0; 2 for wrong variables or flags; otherwise that
# of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
export SEED=${SEED:-1} CONFIG=${CONFIG:-quickstart}
export SAVE=${SAVE:-runs/$CONFIG}
case $CONFIG in
    quickstart | hybrid_quickstart)
        # Two data-parallel replicas of the actor and two of each other role balance the work of the ranks
        # (docs/overlap.md).
        where="actor on ranks 0-1, critic, reward and reference on ranks 2-3"
        roles=(--role-map "actor=0-1;critic=2-3;reward=2-3;reference=2-3")
        ;;
    moe_quickstart)
        where="actor on ranks 0-1, critic on rank 2, reward and reference on rank 3"
        roles=(--role-map "actor=0-1;critic=2;reward=3;reference=3" --actor-expert-model-parallel-size 2)
        ;;
    *) echo "quickstart: CONFIG=$CONFIG: allowed: quickstart, moe_quickstart, hybrid_quickstart" >&2; exit 2 ;;
esac
[[ $SEED =~ ^[0-9]+$ ]] || { echo "quickstart: SEED=$SEED: allowed is a whole number" >&2; exit 2; }
bash "$ROOT/launch/setup_env.sh" >/dev/null
cd "$ROOT"

say() { printf '\nquickstart: %s\n' "$*"; }
if [[ -e $SAVE ]]; then
    number=1
    while [[ -e $SAVE.old-$number ]]; do number=$((number + 1)); done
    mv -- "$SAVE" "$SAVE.old-$number"
    echo "quickstart: the earlier run is now in $SAVE.old-$number"
fi

bash launch/warm_start.sh

say "PPO: $where"
NPROC=4 bash launch/run.sh train_rl --config "configs/$CONFIG.yaml" --prompts "$SAVE/data/train.jsonl" \
    --eval-prompts "$SAVE/data/heldout.jsonl" --tokenizer-model "$SAVE/data/tokenizer.model" --seed "$SEED" \
    "${roles[@]}" --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/ppo" "$@"

say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s: $SAVE/ppo/report.png, $SAVE/ppo/report.html"
