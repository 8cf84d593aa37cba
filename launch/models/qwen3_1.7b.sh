# Qwen3-1.7B: 1.72 B parameters, tied embeddings.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --rotary-base 1000000
)
