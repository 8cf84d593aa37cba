# Qwen2.5-1.5B: 1.54 B parameters, tied embeddings.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 --group-query-attention
    --num-query-groups 2 --kv-channels 128 --add-qkv-bias --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --rotary-base 1000000
)
