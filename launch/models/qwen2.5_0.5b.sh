# Qwen2.5-0.5B: 0.49 B parameters, tied embeddings.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --group-query-attention
    --num-query-groups 2 --kv-channels 64 --add-qkv-bias --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --rotary-base 1000000
)
