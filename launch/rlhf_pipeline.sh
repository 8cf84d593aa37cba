#!/usr/bin/env bash
# RLHF from nothing, on a machine without a GPU, in three stages (2203.02155, figure 2): a policy learns a task half, a
# reward model learns from preferences between the policy's responses, and PPO trains the policy against that model.
# The task is to spell English words backward, as reasoning_gym asks it. Policy and reward model have different
# tokenizers: SentencePiece, and byte-level BPE with a chat template.
#   bash launch/rlhf_pipeline.sh [flags of megarl.train_rl]
#   SEED=2 bash launch/rlhf_pipeline.sh
# Ends with a table (the reward model on held-out pairs; reward, true score and KL of the policy) and SAVE/report.png.
# The true score, that of reasoning_gym on held-out words, is measured and never learnt from.
# Reads: SEED (default 1), SAVE (folder of everything, default runs/rlhf), PYTHON and MEGARL_VENV (environment).
# A folder SAVE that already holds a run is moved aside, never overwritten. Exit status 0; 1 where the table has a value
# outside its limits; else that of what failed.
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
judge=(--tokenizer-model "$SAVE/data/reward-tokenizer")

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
for part in train heldout; do
    NPROC=2 bash launch/run.sh evaluate --config configs/rlhf_samples.yaml "${policy[@]}" --seed "$SEED" \
        --eval-prompts "$SAVE/data/$part.jsonl" --load "$SAVE/sft" --save "$SAVE/samples/$part"
done
"$PYTHON_BIN" tools/make_preferences.py --seed "$SEED" --out "$SAVE/preferences" --min-gap 0.5 --corrupted-pairs 3 \
    --prompts "$SAVE/data/train.jsonl" --samples "$SAVE/samples/train/samples.jsonl" \
    --heldout-prompts "$SAVE/data/heldout.jsonl" --heldout-samples "$SAVE/samples/heldout/samples.jsonl"

say "stage 2: supervised fine-tuning of the language model that the reward model starts from"
NPROC=2 bash launch/run.sh train_sft --config configs/rlhf_reward_sft.yaml "${words[@]}" "${judge[@]}" \
    --save "$SAVE/reward-sft"

say "stage 2: the reward model"
NPROC=2 bash launch/run.sh train_reward --config configs/rlhf_reward.yaml "${judge[@]}" --seed "$SEED" \
    --prompts "$SAVE/preferences/train.jsonl" --eval-prompts "$SAVE/preferences/heldout.jsonl" \
    --pretrained-checkpoint "$SAVE/reward-sft" --save "$SAVE/reward"

say "stage 3: PPO against the reward model"
NPROC=2 bash launch/run.sh train_rl --config configs/rlhf_ppo.yaml "${words[@]}" "${policy[@]}" \
    --reward-tokenizer-model "$SAVE/data/reward-tokenizer" --reward-model "$SAVE/reward" \
    --pretrained-checkpoint "$SAVE/sft" --save "$SAVE/ppo" "$@"

say "report"
# The band of the KL: half as much again as --kl-target in configs/rlhf_ppo.yaml.
"$PYTHON_BIN" tools/rlhf_report.py "$SAVE" --min-accuracy 0.9 --max-kl 3
