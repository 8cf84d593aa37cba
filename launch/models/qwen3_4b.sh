# Qwen3-4B: 4.02 B parameters, tied embeddings.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --rotary-base 1000000
)
