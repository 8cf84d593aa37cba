# Qwen3-8B: 8.19 B parameters.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --rotary-base 1000000
    --untie-embeddings-and-output-weights
)
