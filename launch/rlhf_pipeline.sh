#!/usr/bin/env bash
# Runs RLHF from nothing, without a GPU, in three stages (2203.02155, figure 2): supervised fine-tuning teaches a policy
# part of a task, a reward model is trained on preferences between the policy's responses, and PPO trains the policy
# with that reward model. The task is to spell English words backward (reasoning_gym). Policy and reward model have
# different tokenizers: SentencePiece, and byte-level BPE with a chat template.
#   bash launch/rlhf_pipeline.sh [flags of megarl.train_rl]
#   SEED=2 bash launch/rlhf_pipeline.sh
# Prints a table (reward model on held-out pairs; reward, true score and KL of the policy) and draws SAVE/report.png.
# The true score is reasoning_gym's on held-out words; it is measured but never used for training.
# Reads: SEED (random seed, default 1); SAVE (output folder, default runs/rlhf); PYTHON and MEGARL_VENV (see
# launch/setup_env.sh).
# An existing folder SAVE is renamed, never overwritten.
# Exit status: 0; 1 if a value of the table is outside its limits; 2 for wrong variables or flags; otherwise that of the
# command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
export SEED=${SEED:-1} SAVE=${SAVE:-runs/rlhf}
[[ $SEED =~ ^[0-9]+$ ]] || { echo "rlhf_pipeline: SEED=$SEED: allowed is a whole number" >&2; exit 2; }
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\nrlhf_pipeline: %s (%d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }
if [[ -e $SAVE ]]; then
    number=1
    while [[ -e $SAVE.old-$number ]]; do number=$((number + 1)); done
    mv -- "$SAVE" "$SAVE.old-$number"
    echo "rlhf_pipeline: the earlier run is now in $SAVE.old-$number"
fi
words=(--prompts "$SAVE/data/train.jsonl" --eval-prompts "$SAVE/data/heldout.jsonl" --seed "$SEED")
policy=(--tokenizer-model "$SAVE/data/tokenizer.model")
reward_model=(--tokenizer-model "$SAVE/data/reward-tokenizer")

say "stage 1: words, tokenizers, and supervised fine-tuning of a policy on two ranks"
"$PYTHON_BIN" tools/make_prompts.py --task spell_backward --train 8000 --heldout 800 --seed "$SEED" \
    --out "$SAVE/data" --prompt-template '{metadata[word]} backward:' \
    --task-option min_word_len=3 --task-option max_word_len=6
"$PYTHON_BIN" tools/train_tokenizer.py --input "$SAVE/data/train.jsonl" --vocab-size 72 --out "$SAVE/data/tokenizer"
"$PYTHON_BIN" tools/train_tokenizer.py --input "$SAVE/data/train.jsonl" --vocab-size 328 --kind bpe \
    --eos-token '<|end|>' --special '<|user|>' '<|assistant|>' --chat-template configs/rlhf_chat.jinja \
    --out "$SAVE/data/reward-tokenizer"
NPROC=2 bash launch/run.sh train_sft --config configs/rlhf_sft.yaml "${words[@]}" "${policy[@]}" --save "$SAVE/sft"

say "stage 2: responses of that policy, and preferences between them"
for split in train heldout; do
    NPROC=2 bash launch/run.sh evaluate --config configs/rlhf_samples.yaml "${policy[@]}" --seed "$SEED" \
        --eval-prompts "$SAVE/data/$split.jsonl" --load "$SAVE/sft" --save "$SAVE/samples/$split"
done
"$PYTHON_BIN" tools/make_preferences.py --seed "$SEED" --out "$SAVE/preferences" --min-gap 0.5 --corrupted-pairs 3 \
    --prompts "$SAVE/data/train.jsonl" --samples "$SAVE/samples/train/samples.jsonl" \
    --heldout-prompts "$SAVE/data/heldout.jsonl" --heldout-samples "$SAVE/samples/heldout/samples.jsonl"

say "stage 2: supervised fine-tuning of the language model that the reward model starts from"
NPROC=2 bash launch/run.sh train_sft --config configs/rlhf_reward_sft.yaml "${words[@]}" "${reward_model[@]}" \
    --save "$SAVE/reward-sft"

say "stage 2: the reward model"
NPROC=2 bash launch/run.sh train_reward --config configs/rlhf_reward.yaml "${reward_model[@]}" --seed "$SEED" \
    --prompts "$SAVE/preferences/train.jsonl" --eval-prompts "$SAVE/preferences/heldout.jsonl" \
    --pretrained-checkpoint "$SAVE/reward-sft" --save "$SAVE/reward"

say "stage 3: PPO against the reward model"
NPROC=2 bash launch/run.sh train_rl --config configs/rlhf_ppo.yaml "${words[@]}" "${policy[@]}" \
    --reward-tokenizer-model "$SAVE/data/reward-tokenizer" --reward-model "$SAVE/reward" \
    --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/ppo" "$@"

say "report"
# The KL limit is 1.5 times --kl-target of configs/rlhf_ppo.yaml.
"$PYTHON_BIN" tools/rlhf_report.py "$SAVE" --min-accuracy 0.9 --max-kl 3
